"""Names in a Hugging Face set on disk that its maker and its reader share. Light: no torch here."""

IDS, LABELS = "input_ids", "labels"
METADATA = "sqshforge.json"
"""Written by training.data.tokenize beside the rows; says how large the vocabulary is."""
