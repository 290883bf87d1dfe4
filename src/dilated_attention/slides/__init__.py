"""Many slides: `files` reads features, `encode` makes embeddings, `maps` draws attention."""
