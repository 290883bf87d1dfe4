"""Dilated attention in other libraries. Nothing here is imported by the package itself."""
