"""What a draft engine notes of its sessions while its pool learns: texts, counts, and drafts in the shadow."""
