"""The laboratory's verbs of the `outrider` command, a module per verb; nothing imports it."""
