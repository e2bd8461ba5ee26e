"""A stream of documents, local or remote, as what one rank reads."""
