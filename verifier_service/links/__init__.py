"""The verifier's ends of its links to drafters: frames, and tensor channels beside them."""
