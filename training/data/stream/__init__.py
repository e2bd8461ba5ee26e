"""Streams of documents, local or remote, and the feed that one rank reads from them."""
