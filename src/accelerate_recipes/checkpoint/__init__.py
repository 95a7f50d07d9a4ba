"""Checkpoints that a kill cannot spoil, exact resume, and the export that `from_pretrained` loads.

`<output_dir>/checkpoint-<step>/` holds

    state/               model and optimizer shards, in the one format of torch.distributed.checkpoint
    rng-<rank>.pt        random generators of each rank
    args.yaml            resolved arguments; with the step they give the schedule and the position in the data
    data.json            positions of data streams, or a checksum of data with a fixed order of rows
    metrics.jsonl        the records so far
    config.json, ...     configuration, tokenizer and generation config of the model
    adapter_config.json  for a model with adapters: then state/ holds only the adapters
    model.safetensors    only under FULL_STATE_DICT; or adapter_model.safetensors
    complete.json        the marker, written last: step, world size, strategy, versions, size and checksum of every file

The directory is written as `checkpoint-<step>.partial`, and renamed when the marker is on the disk. A directory without
marker, or without the files that the marker lists, is no checkpoint: it is skipped with a warning. Nothing is read from
a checkpoint before its checksums are verified. Training stands still only while the state is copied; a thread writes the
copy. docs/checkpoints.md explains this for users.
"""
