"""Model weights from one format to another: `python -m training.convert --from F SRC --to F DST`.

Formats:
    hf            Hugging Face: config.json with model_type, and model.safetensors, or shards
                  model-0000N-of-0000M.safetensors with model.safetensors.index.json. Read are also
                  pytorch_model.bin and its shards. All families.
    state-spaces  mamba-ssm's: config.json with d_model and ssm_cfg, and pytorch_model.bin. Mamba,
                  Mamba-2, and Bamba as fms-fsdp has it.
    ours          A folder of weights: config.json {"family": ..., "sizes": {...}} (training.models'
                  sizes, all of them) and safetensors files called as hf's. Tensors have the
                  models' own parameter names, the output embedding left out where it is tied.
                  Read is also what training writes: a run's folder (its newest complete
                  checkpoint) or one of its checkpoints, whatever the number of ranks.
    neuron        The Neuron system's Mamba-2: hf's, with in_proj cut in three and
                  rmsnorm_within_groups in config.json. Read is also in_proj in one.
    neuron-fused  Written only: the same with in_proj in one, which transformers reads.
    neuron-tp     Read only: one of its checkpoints, <tag>_step_<n> with the files of each rank.
    codestral     Read only: Mistral's Mamba-2, params.json and consolidated.safetensors.
    composer      Read only: a checkpoint of training.mamba_composer, such as ep0-ba40-rank0.pt, or
                  the folder of its run (the newest there).

A folder of weights has all that `training.models.build` and a model's parameters need, so training
can start from it: `training.convert.source.Source.open("ours", folder)` has `sizes`, and
`read(parameter)` gives one parameter at a time. Files of a tokenizer go along from SRC to DST.

Memory: no more than one file that is written and one parameter. DST is complete or absent.
"""

SOURCES = ("hf", "state-spaces", "ours", "composer", "neuron", "neuron-tp", "codestral")
TARGETS = ("hf", "state-spaces", "ours", "neuron", "neuron-fused")
