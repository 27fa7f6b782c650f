"""How checkpoints hold weights: files, slices, quantised layouts; all become plain tensors."""
