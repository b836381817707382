"""The rest of transformers' `TrainingArguments`: what is so anyway, what has no equivalent, and why."""

from __future__ import annotations

from trueshard.train.convert import values
from trueshard.train.convert.rules import always, command, none, sets

HUB = "nothing is uploaded; `trueshard export` writes a directory that any tool uploads"
BEST = "[evaluation] patience keeps the best checkpoint; it is judged by the loss"
SAMPLES = "the order is a pure function of seed and sample number, the same at every number of ranks"
COMMAND = "what is done is the command's choice, not the configuration's"

REST = (
    none("label_smoothing_factor", "the loss is plain cross entropy, in chunks of the vocabulary", off=[0]),
    always(
        "average_tokens_across_devices",
        "the loss is the mean over all target tokens of the global batch",
        {False: "it always is the mean over all target tokens: ranks with fewer weigh less"},
    ),
    none("bf16_full_eval fp16_full_eval", "evaluation computes as training does", off=[False]),
    none("tf32", "torch.set_float32_matmul_precision decides it, before the run", off=[False]),
    none(
        "use_liger_kernel liger_kernel_config",
        "the loss never holds the whole logits; shard.compile fuses the rest",
        off=[False],
    ),
    always("use_cache", "a model that trains keeps no cache", {True: "a model that trains keeps no cache"}),
    none("neftune_noise_alpha", "no noise is added to embeddings"),
    none("torch_empty_cache_steps", "the planner says beforehand what fits; train.on_oom says what else to do"),
    always("logging_first_step logging_nan_inf_filter", "metrics.jsonl has every step as it is"),
    always("include_num_input_tokens_seen include_tokens_per_second", "both are in metrics.jsonl"),
    always(
        "log_on_each_node log_level log_level_replica disable_tqdm logging_dir",
        "rank 0 shows a progress bar on a terminal and lines elsewhere; metrics.jsonl is in run.dir",
    ),
    none("run_name", "a run is called by its folder, run.dir"),
    none("trackio_space_id trackio_bucket_id trackio_static_space_id", "trackio's own settings say it"),
    none("eval_delay", "evaluation begins with the first multiple of evaluation.every", off=[0]),
    none("eval_on_start", "evaluation begins with the first multiple of evaluation.every", off=[False]),
    none("do_predict predict_with_generate", COMMAND, off=[False]),
    always(
        "do_train do_eval resume_from_checkpoint overwrite_output_dir",
        "the same command on the same run.dir resumes; [evaluation] evaluates",
    ),
    always(
        "per_device_eval_batch_size eval_accumulation_steps eval_use_gather_object eval_do_concat_batches "
        "prediction_loss_only",
        "evaluation takes microbatches as training does, and keeps only sums",
    ),
    none(
        "include_for_metrics batch_eval_metrics label_names include_inputs_for_metrics",
        "evaluation is loss and perplexity; in Python, a callback measures more",
        off=[False],
    ),
    none("save_only_model", "a checkpoint always resumes; `trueshard export` writes the model alone", off=[False]),
    none("save_on_each_node", "ranks write into one directory that all machines share", off=[False]),
    always("save_safetensors", "checkpoints are safetensors"),
    always("enable_jit_checkpoint", "SIGTERM ends the run with a checkpoint"),
    none(
        "push_to_hub hub_token hub_private_repo hub_model_id hub_always_push hub_revision push_to_hub_model_id "
        "push_to_hub_organization push_to_hub_token",
        HUB,
        off=[False, "<hub_token>", "<push_to_hub_token>"],
    ),
    none("hub_strategy", HUB, off=["every_save"]),
    none("load_best_model_at_end greater_is_better", BEST, off=[False]),
    none("metric_for_best_model", BEST, off=["loss", "eval_loss"]),
    none("ignore_data_skip", "a resumed run always goes on with the next sample", off=[False]),
    always("restore_callback_states_from_checkpoint", "callbacks are saved and restored"),
    none(
        "full_determinism",
        "torch.use_deterministic_algorithms decides it; the order of samples is fixed anyway",
        off=[False],
    ),
    none("data_seed", "train.seed decides weights and order alike"),
    none("use_cpu no_cuda", 'ranks take the devices that they see; CUDA_VISIBLE_DEVICES="" hides them', off=[False]),
    none(
        "use_mps_device tpu_num_cores tpu_metrics_debug use_ipex use_habana",
        "CUDA devices and CPUs are supported",
        off=[False],
    ),
    always(
        "accelerator_config dispatch_batches split_batches dataloader_in_order dataloader_pin_memory "
        "dataloader_persistent_workers",
        SAMPLES,
    ),
    none("dataloader_multiprocessing_context", "data is made ready in the background of each rank (data.prefetch)"),
    always("dataloader_drop_last", "a step has always train.batch_size sequences"),
    always(
        "dataloader_num_workers dataloader_prefetch_factor",
        "data is prepared once and made ready in the background (data.prefetch, in steps)",
    ),
    none(
        "parallelism_config", "ranks only share parameters; tensor, context and sequence parallelism have no equivalent"
    ),
    always("remove_unused_columns", "data.field, or the format, says which columns count"),
    none("train_sampling_strategy", "samples come in random order; packing leaves no padding to save", off=["random"]),
    none("group_by_length", "packing leaves no padding to save", off=[False]),
    always("length_column_name", "of effect only with grouping by length"),
    always(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph",
        "for DistributedDataParallel, which is not used",
    ),
    sets("ddp_timeout", "run.timeout", values.whole, "the same"),
    command("ddp_backend", "nccl on CUDA devices, gloo on CPUs", "chosen by the device"),
    none("deepspeed", "another engine, with no equivalent; FSDP's words are in [shard]"),
    none("debug", "ranks agree on structure before anything is communicated", off=["[]"]),
    always("skip_memory_metrics", "allocated and planned memory is in metrics.jsonl"),
    always("local_rank ddp_local_rank", "the launcher says it"),
    none(
        "sharded_ddp fp16_opt_level half_precision_backend fp16_backend mp_parameters past_index ray_scope",
        "of older releases; without effect in present ones",
        off=["o1", "auto", "last", -1, "[]"],
    ),
    none("torchdynamo jit_mode_eval", "shard.compile", off=[False]),
    none("use_legacy_prediction_loop", "of older releases", off=[False]),
    none("fsdp_min_num_params", "units are named by class or glob (shard.units), not by size", off=[0]),
)
