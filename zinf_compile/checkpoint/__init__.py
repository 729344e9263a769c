"""Whole states in and out of a partitioned model, and safetensors files read and written without trust in what they say.

folder_update — New files of a folder that take the place of the old ones together: a process killed at any moment leaves
    all old or all new.
gathered — Whole values of partitioned models: read or change them in place, save them, load them, one parameter at a time.
load_optimizer_state — Whole states of an optimizer, spread over the ranks when they are loaded.
regular_file — Files of a checkpoint opened so that nothing else in their place can hang or mislead the process.
safetensors_header — The header of a safetensors file, taken on trust in nothing: what the library refuses is refused, and
    said by name.
safetensors_index — Which files a checkpoint consists of, and which of several has which tensor.
safetensors_reader — Tensors in safetensors files: where each one lies, and any range of its bytes, without reading the
    rest.
safetensors_writer — Writes one safetensors file from tensors of the host, so that what fails is an `OSError` that names the
    file.
save_optimizer_state — Whole states of an optimizer, gathered on rank 0 to be saved.
save_safetensors — Save a partitioned model as safetensors, as transformers lays them out, with never more than one file's
    tensors in memory.
strict_json — JSON as the Rust reader of safetensors takes it, which is stricter than Python's: no name twice, no NaN, no
    half of a pair.
"""
