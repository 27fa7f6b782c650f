"""The verifier's ends of its connections to drafters: frames, and tensors beside them."""
