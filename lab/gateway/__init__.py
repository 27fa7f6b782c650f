"""`outrider bench gateway`: the real service around an engine without a model, and what each of its processes takes."""
