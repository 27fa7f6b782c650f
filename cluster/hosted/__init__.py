"""The verifier's side of speculation, as a plug-in of another engine: drafts of a pool, priced per step."""
