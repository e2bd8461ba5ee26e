"""How training is spread over ranks: one file a backend."""
