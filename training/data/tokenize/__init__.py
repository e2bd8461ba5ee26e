"""Turn texts into a Hugging Face set on disk, with rows of seq_len tokens, for training.data.arrow.

Terms: a document is one text of the source. A shard is a run of documents that are tokenized
together; its tokens are one file in the work folder, a hidden folder beside the set. A block is
seq_len tokens, one row of the set. The tokens of all documents are concatenated and cut into blocks
regardless of shards: only the rest at the very end is dropped.
"""
