"""Convert model weights between formats: `python -m training.convert --from F SRC --to F DST`.

Formats:
    hf            Hugging Face: config.json with model_type, and model.safetensors, or shards
                  model-0000N-of-0000M.safetensors with model.safetensors.index.json. Reading also
                  accepts pytorch_model.bin and its shards. All families.
    state-spaces  mamba-ssm's: config.json with d_model and ssm_cfg, and pytorch_model.bin. Mamba,
                  Mamba-2, and Bamba in the layout of fms-fsdp.
    ours          A folder of weights: config.json {"family": ..., "sizes": {...}} (all sizes of
                  training.models) and safetensors files named like hf's. Tensors have the models'
                  own parameter names; a tied output embedding is left out. Reading also accepts
                  what training writes: a run's folder (its newest complete checkpoint) or one of
                  its checkpoints, from any number of ranks.
    neuron        The Neuron system's Mamba-2: hf's, with in_proj cut in three and
                  rmsnorm_within_groups in config.json. Reading also accepts in_proj in one.
    neuron-fused  Written only: the same with in_proj in one, which transformers reads.
    neuron-tp     Read only: one of its checkpoints, <tag>_step_<n> with the files of each rank.
    codestral     Read only: Mistral's Mamba-2, params.json and consolidated.safetensors.
    composer      Read only: a checkpoint of training.mamba_composer, such as ep0-ba40-rank0.pt, or
                  the folder of its run (for its newest checkpoint).

A folder of weights has all that `training.models.build` and a model's parameters need, so training
can start from it: `training.convert.source.Source.open("ours", folder)` has `sizes`, and
`read(parameter)` returns one parameter at a time. Tokenizer files are copied from SRC to DST.

Memory holds at most one file being written and one parameter. DST is complete or absent.
"""

SOURCES = ("hf", "state-spaces", "ours", "composer", "neuron", "neuron-tp", "codestral")
TARGETS = ("hf", "state-spaces", "ours", "neuron", "neuron-fused")
