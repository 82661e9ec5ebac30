"""One file per engine: each translates the engine's words into the store's, and holds no policy."""
