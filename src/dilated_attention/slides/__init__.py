"""Many slides: `files` reads features, `encode` makes embeddings, `maps` and `draw` show attention."""
