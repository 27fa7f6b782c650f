"""From logits to tokens: processors, grammars, and the rules by which drafts are accepted."""
