"""The rest of the keys around Composer's `parallelism_config`: of its `Trainer`, and of llm-foundry's YAML."""

from __future__ import annotations

from trueshard.train.convert import values
from trueshard.train.convert.rules import always, command, none, sets

DATA = "data is a folder, files or a data set by name: set data.path, data.format and [evaluation]"
PYTHON = "an object of Python; trueshard.Trainer takes callbacks and loaders of your own"
SHOWN = "a terminal shows progress, a file plain lines; metrics.jsonl has every step"
ONE_DIRECTORY = "a checkpoint is a Hugging Face directory that also resumes; `trueshard export` writes other forms"

REST = (
    none("train_loader eval_loader train_dataloader eval_dataloader data_local data_remote variables", DATA),
    none(
        "icl_tasks icl_tasks_str icl_subset_num_batches icl_seq_len eval_gauntlet eval_gauntlet_str evaluators",
        "evaluation is loss and perplexity",
    ),
    none("train_dataloader_label algorithm_passes train_subset_num_batches", PYTHON, off=["train", -1]),
    always("spin_dataloaders", "the order is a pure function of seed and sample number: nothing is spun through"),
    none(
        "callbacks",
        "speed, memory, learning rate and norms are in metrics.jsonl; in Python, trueshard.Trainer takes callbacks",
    ),
    none("scale_schedule_ratio", "the schedule ends with train.steps", off=[1]),
    always("step_schedulers_every_batch", "the learning rate is a function of the step"),
    none("eval_subset_num_batches", "evaluation.samples, in samples", off=[-1]),
    none("eval_first", "evaluation begins with the first multiple of evaluation.every", off=[False]),
    always("device_eval_batch_size device_eval_microbatch_size", "evaluation takes microbatches as training does"),
    none("run_name", "a run is called by its folder, run.dir"),
    always(
        "progress_bar log_to_console console_stream console_log_interval log_traces python_log_level log_config "
        "auto_log_hparams",
        SHOWN,
    ),
    none("metadata flatten_metadata", "the resolved configuration is stored with the run"),
    none("load_path", "a run goes on from its own run.dir; else set model.path to a Hugging Face directory"),
    always(
        "load_object_store load_progress_bar load_strict_model_weights", "what does not fit is an error that names it"
    ),
    none(
        "load_weights_only load_ignore_keys load_exclude_algorithms",
        "model.path is weights alone; a resume is exact",
        off=[False],
    ),
    always(
        "save_filename save_latest_filename save_overwrite",
        "checkpoints are called by their step; `latest` names the newest",
    ),
    none(
        "save_weights_only save_ignore_keys save_metrics only_hf_checkpoint only_composer_checkpoint",
        ONE_DIRECTORY,
        off=[False],
    ),
    always("autoresume", "the same command on the same run.dir resumes"),
    none("device", "ranks take the devices that they see", off=["gpu", "cpu"]),
    none("precision_config", "for 8 bits, which have no equivalent"),
    always("accumulate_train_batch_on_tokens", "the loss is the mean over all target tokens of the global batch"),
    none(
        "deterministic_mode",
        "torch.use_deterministic_algorithms decides it; the order of samples is fixed anyway",
        off=[False],
    ),
    sets("dist_timeout", "run.timeout", values.whole, "the same"),
    always("ddp_sync_strategy", "gradients are communicated once, after the last microbatch"),
    command("profiler", "--profile", "the command writes one trace"),
    none("batch_rampup initial_per_device_train_batch_size", "train.batch_size is the same in every step"),
    none("code_paths", PYTHON, off=["[]"]),
    command("max_split_size_mb expandable_segments", "PYTORCH_CUDA_ALLOC_CONF", "the environment says it"),
    always("cuda_load_lazily", "CUDA loads lazily by itself"),
    none("fsdp_auto_wrap", "units are the model's own hints, else its blocks", off=[True]),
    none("grad_accum", "older spelling; set train.accumulate", off=[1]),
)
