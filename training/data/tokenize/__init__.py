"""From texts to a Hugging Face set on disk of rows of seq_len tokens, for training.data.arrow.

Words: a document is one text of the source. A shard is a run of documents that is tokenized at
once; its tokens are one file in the work folder, a hidden one beside the set. A block is seq_len
tokens, one row of the set. The tokens of all documents stand in one line, and blocks are cut from
that line whatever the shards are: only what is left at its very end is dropped.
"""
