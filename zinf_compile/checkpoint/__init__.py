"""Whole states in and out of a partitioned model, and safetensors files, whose contents are validated before use.

accumulated_gradients — Gradients that are accumulated and not yet applied: saved from their tier, restored to it, piece by
    piece.
announced — Folders that were announced for checkpoints (option `checkpoint`): before the first step a dry run of a save,
    and space.
background — The part of a save that goes on beside training: parameters and states are written, and it is committed.
checkpoint_files — What `load` needs of an open checkpoint, whoever has written it.
companions — Tensors of a model's state that are partitioned like a parameter, such as averages kept as buffers: each
    rank's own shard.
consolidate — Writes the model of a saved checkpoint as safetensors in the layout of transformers, piece by piece.
converted_files — A saved checkpoint under other names and in other types: what `rename=` and `dtype=` make of it.
converted_tensors — Safetensors files under other names and in other types, for a model on meta.
deepspeed_files — Checkpoints of DeepSpeed's ZeRO-1, 2 and 3, read without DeepSpeed: where in the ranks' files each
    parameter is.
deepspeed_universal — DeepSpeed's universal checkpoints, read without DeepSpeed: a folder for each parameter, a file for each
    of its values.
dcp — States for `dcp.save` and `dcp.load` in the user's own loop: read and written part by part, never whole in
    memory.
dcp_tensor — A tensor of which `torch.distributed.checkpoint` saves and loads this rank's parts, each read or written
    when its turn comes.
file_layout — Plans the files of one rank before the first byte: their rectangles, and where in which file each one is.
fill_shards — Fills shards from a checkpoint: the next pieces are read while the last ones are written, a few of them in
    memory at a time.
fit — Finds what of a saved checkpoint goes to which tensor of a model and its optimizers, and all that doesn't fit,
    before a load.
folder_update — Atomic replacement of the files of a folder: a process killed at any moment leaves all old files or all
    new ones.
foreign — A checkpoint that another program has written, as this package sees it: tensors by name, states of parameters,
    settings.
gathered — Full values of partitioned models: read or change them in place, save them, load them, one parameter at a
    time.
imported_files — A checkpoint of another program in the form in which `load` reads one, made to fit the model and
    optimizers that it is for.
intake — Renaming and conversion of a checkpoint's tensors as they are loaded (`rename=`, `dtype=`), checked as a whole.
load — Loads a saved checkpoint onto any number of ranks, tiers and tiles: each rank reads the elements that it has.
load_optimizer_state — Loading of an optimizer's full states: rank 0 reads them, all ranks receive their shards.
local_buffers — Buffers that differ from rank to rank, such as running means of each rank's own batches: each rank's own.
manifest — Names and JSON files of a checkpoint's folder: one manifest of the whole, and one of each rank's files.
model_files — The files of a model's values: safetensors files, or what `save`, DeepSpeed or `torch.save` have written.
notices — Lines that a user is to see once, whether or not the program has set up logging.
open_files — Recognises and opens what `load` is given: what `save` has written, a checkpoint of DeepSpeed, a file of
    `torch.save`.
parts_writer — Writes the files of a checkpoint in any order, past the page cache, with a bounded number of bytes in
    memory.
pickled — Reads pickles without executing anything in them: classes and functions that they name stay names.
plain_values — Encodes plain Python values as JSON and tensors, and decodes them: settings and what users save beside a
    model.
random_states — Random generators of each rank: PyTorch's on the host and on the accelerator, and Python's.
rank_contents — What one rank saves of a model and its optimizers: parts of tensors, and their values piece by piece.
rank_files — The files of a checkpoint that one rank writes: allocated before the first byte, filled, synced, described.
rectangles — Cuts a flat range of a tensor into rectangles.
regular_file — Opens files of a checkpoint; FIFOs, devices, sockets and folders are refused before they can block the
    process.
reserved_space — Space on a drive that is held for checkpoints to come: files without a name, which become the files of
    a save.
safetensors_header — Parses and validates the header of a safetensors file: refuses what the safetensors library
    refuses, naming the tensors.
safetensors_index — Finds the files of a checkpoint and, with an index, the tensors of each file.
safetensors_reader — Tensors in safetensors files: the location of each, and reads of any range of its elements.
safetensors_writer — Writes one safetensors file from host tensors; failures are `OSError`s that name the file.
save — Saves a model and its optimizers; every rank writes its own shards, and nothing is gathered.
save_folder — The folder that checkpoints are saved in: one job at a time, each checkpoint whole or absent.
save_optimizer_state — Saving of an optimizer's full states: gathered on rank 0 in the format of eager's
    `state_dict()`.
save_safetensors — Saves a partitioned model as safetensors in the layout of transformers, with the tensors of one file
    in memory at a time.
saved_files — Reads any range of the tensors of a saved checkpoint, with its checksums.
saved_pieces — The pieces that a save has still to write when it returns: its thread writes them, or who is about to change
    one.
saved_steps — Deferred steps that are under way when a save begins: it takes from them what they have still to make, and
    waits for none.
saved_tensors — The tensors that a checkpoint's manifests describe, with the parts of each: all that no save writes is
    refused here.
saved_tiles — Tiles that a graph has cut for a cap, saved with the parameters that have them, and made again before a load.
shard_parts — Rectangles of a whole tensor that one rank's shard holds, and where in the shard each of them is.
shard_reader — Reads this rank's shard of a saved tensor piece by piece, in the order of the parameter's memory.
stretches — The stretches of a checkpoint's files that have a checksum each: read by the I/O engine, compared when they
    have arrived.
strict_json — JSON as strict as the Rust reader of safetensors: no duplicate keys, no NaN, no lone surrogates.
torch_archive — Files of `torch.save`: values and tensors without executing anything in them, and elements of tensors read by
    ranges.
torch_files — Plain files of `torch.save`: a model's state dict, alone or beside those of its optimizers.
verify — Reads every byte of a saved checkpoint and compares headers and checksums; all that is wrong is listed.
"""
