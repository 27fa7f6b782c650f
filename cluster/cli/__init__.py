"""The `outrider` command, a module per verb; nothing imports it."""
