"""Whole states in and out of a partitioned model, and safetensors files, whose contents are validated before use.

folder_update — Atomic replacement of the files of a folder: a process killed at any moment leaves all old files or all new
    ones.
gathered — Full values of partitioned models: read or change them in place, save them, load them, one parameter at a time.
load_optimizer_state — Loading of an optimizer's full states: rank 0 reads them, all ranks receive their shards.
regular_file — Opens files of a checkpoint; FIFOs, devices, sockets and folders are refused before they can block the
    process.
safetensors_header — Parses and validates the header of a safetensors file: refuses what the safetensors library refuses,
    naming the tensors.
safetensors_index — Finds the files of a checkpoint and, with an index, the tensors of each file.
safetensors_reader — Tensors in safetensors files: the location of each, and reads of any range of its elements.
safetensors_writer — Writes one safetensors file from host tensors; failures are `OSError`s that name the file.
save_optimizer_state — Saving of an optimizer's full states: gathered on rank 0 in the format of eager's `state_dict()`.
save_safetensors — Saves a partitioned model as safetensors in the layout of transformers, with the tensors of one file in
    memory at a time.
strict_json — JSON as strict as the Rust reader of safetensors: no duplicate keys, no NaN, no lone surrogates.
"""
