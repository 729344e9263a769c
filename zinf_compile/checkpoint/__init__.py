"""Whole states in and out of a partitioned model, and safetensors files read and written without trust in what they say.

file_layout — The files of one rank's part of a checkpoint, planned before the first byte: which rectangles, where in which
    file.
folder_update — Atomic replacement of the files of a folder: a process killed at any moment leaves all old files or all new
    ones.
gathered — Full values of partitioned models: read or change them in place, save them, load them, one parameter at a time.
load_optimizer_state — Full states of an optimizer, scattered over the ranks when they are loaded.
parts_writer — Writes the files of a checkpoint in any order, past the page cache, with a bounded number of bytes in memory.
rectangles — Flat ranges of a tensor as rectangles: a shard is a flat range, while files hold rectangles of the whole
    tensor.
regular_file — Opens files of a checkpoint; FIFOs, devices, sockets and folders are refused before they can block the
    process.
safetensors_header — Parses and validates the header of a safetensors file: refuses what the safetensors library refuses,
    naming the tensors.
safetensors_index — Finds the files of a checkpoint, and from an index which file has which tensor.
safetensors_reader — Tensors in safetensors files: the location of each, and reads of any range of its elements.
safetensors_writer — Writes one safetensors file from host tensors; failures are `OSError`s that name the file.
save_optimizer_state — Full states of an optimizer, gathered on rank 0 to be saved.
save_safetensors — Save a partitioned model as safetensors in the layout of transformers, with the tensors of one file in
    memory at a time.
strict_json — JSON as strict as the Rust reader of safetensors: no duplicate keys, no NaN, no lone surrogates.
"""
