"""Many slides: `files` reads features, `encode` makes embeddings, `maps` shows attention."""
