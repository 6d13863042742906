# Written by `make docs` from schemas/config/: change that, not this file.
"""The configuration of a job as typed dictionaries: every key is optional."""

from typing import Any, Literal, TypedDict

class TrackingConfigDict(TypedDict, total=False):
    entity: str | None
    """wandb team or user; default: the key's."""
    episodes_every: int
    """Log a table of episodes (messages, reward, version) every N steps; 0: never."""
    max_episodes: int
    """Episodes per table."""

class ModelConfigDict(TypedDict, total=False):
    path: str
    """Hugging Face folder, or the name of a model on the hub."""
    tokenizer: str | None
    """Folder of the tokenizer; default: the model's own."""
    attn_implementation: Literal['auto', 'sdpa', 'varlen', 'flash_attention_2']
    """Attention kernel of the learner ([kernels](training.md#kernels-and-memory)). varlen: torch's for packed rows; flash_attention_2: that of the extra `flash-attn`; sdpa: with a mask, in any dtype; auto: on a GPU the first of these that can compute the model, on CPUs sdpa."""
    trust_remote_code: bool
    """Run code that comes with the model."""
    template_kwargs: dict[str, Any]
    """Arguments of the chat template at every turn (`enable_thinking: false`)."""

class RewardConfigDict(TypedDict, total=False):
    source: Literal['game', 'function', 'endpoint', 'judge']
    """The game alone, a Python function, an HTTP endpoint, or a judge model."""
    per: Literal['episode', 'turn']
    """Once at the end of the episode, or after every turn."""
    weight: float
    """Factor of the source's reward."""
    game_weight: float
    """Factor of the game's own rewards, which are added."""
    function: str | None
    """`package.module:function`, with verl's arguments: `data_source`, `solution_str`, `ground_truth`, `extra_info`, and `messages` and `info` if it takes them. Async functions share one event loop."""
    url: str | None
    """Endpoint that gets the same as JSON; for a judge the base URL of an OpenAI-compatible API."""
    key_variable: str | None
    """Environment variable of the environment host with the key for `url`."""
    judge: str | None
    """Inference job that judges, by id or name, through the broker; or the model's name at `url`."""
    judge_prompt: str | None
    """The judge's prompt: `$question` is the first user message, `$answer` the policy's last, `$ground_truth` the row's, `$conversation` all, `$scale` the best score; `$form` demands the score ([judges](training.md#external-rewards)). Default: grade the answer."""
    judge_scale: float
    """Best score, which earns 1."""
    judge_tokens: int
    """Tokens of the judge's reply; a longer one is refused."""
    judge_request: dict[str, Any]
    """Further fields of requests to a judge at `url`, such as `reasoning_effort`; null removes one: `{max_tokens: null}`."""
    timeout_s: float
    """Time limit of one reward, including all tries."""
    tries: int
    """Tries while endpoint or judge is unreachable, busy or slow."""
    max_requests: int
    """Concurrent rewards per host."""

class EnvConfigDict(TypedDict, total=False):
    game: str
    """Registered name (`tinkermq env list`) or `package.module:Class`; empty: callers bring one."""
    kwargs: dict[str, Any]
    """Arguments of the game's constructor."""
    train_data: list[str]
    """Parquet, Arrow or JSONL files of a dataset game, folders of Hugging Face's `save_to_disk`, or `harbor:FOLDER` for an agent program; empty: the game generates its states."""
    val_data: list[str]
    """Validation files of a dataset game."""
    num_val: int
    """Validation tasks: rows of `val_data` after a seeded shuffle, or seeds."""
    hosts: int
    """Environment hosts in the pool; 0: the client hosts the game (`GameEnvironment`)."""
    workers: int
    """Games that step concurrently in one host."""
    isolation: Literal['thread', 'process'] | None
    """Where games run; default: as the game's class says, else in threads. A hung game can be killed in a process, not in a thread."""
    worker_memory_mb: int | None
    """Memory per worker process beyond loading its games; an episode that exceeds it fails. Default: no bound."""
    reset_timeout_s: float
    """A reset that takes longer fails its episode."""
    step_timeout_s: float
    """A step that takes longer fails its episode, or ends it as `on_step_timeout` says."""
    on_step_timeout: Literal['retry', 'penalty', 'mask']
    """When a step times out: retry: the episode fails and is played again; penalty: it ends with `step_timeout_reward`; mask: it ends, and is neither trained nor compared with. penalty and mask run games in processes, unless `isolation` is thread or the game is async."""
    step_timeout_reward: float
    """Reward of a turn whose step times out, replacing that turn's others."""
    reward: RewardConfigDict
    lease_s: float
    """An episode that is neither stepped nor closed for this long is freed."""

class McpServerDict(TypedDict, total=False):
    name: str
    """Its name among the servers; default: `server1`, `server2` and so on."""
    command: str
    """Program of a server over stdio; `{python}` stands for the pool's interpreter."""
    args: list[str]
    """Its arguments."""
    env: dict[str, str]
    """Its environment variables."""
    url: str
    """URL of a server over streamable HTTP."""
    headers: dict[str, str]
    """Headers of each request to it."""

class AgentConfigDict(TypedDict, total=False):
    command: list[str]
    """Program and arguments to run for each episode. `{prompt}`, `{workdir}`, `{files}`, `{input}` and `{python}` stand for the task's last user message, the working folder, the copy of `files`, the file with the task's row, and the pool's interpreter. Empty: no agent run, or `client`."""
    client: bool
    """Clients run the episodes: with `env.hosts=0` (then the default) callers of `AgentEpisodes` or hosts of a Python function, with `env.hosts=1` clients of a gateway's `/v1/episodes`."""
    tasks: str | None
    """`harbor:FOLDER`: the folder's [Harbor tasks](harbor.md) are the data; short for `env.train_data`, which then holds it. Their tests give the reward."""
    val_share: float
    """Share of `tasks`, by a digest of their names, that is `env.val_data` and not trained."""
    files: str | None
    """Folder that is copied as the program's folder for each try; default: an empty folder. Folders here are relative to where the run is submitted or, with `env.hosts=0`, to where `tinkermq agent host` runs."""
    setup: list[str]
    """Command run there before the program, in the same sandbox."""
    reward: list[str]
    """Command run after all processes of the program have ended. Its last line of output is a number, or an object with `reward` and optionally `success` and `info`; posted rewards then do not count."""
    reward_files: str | None
    """Folder visible to the reward command only, as `{grader}`; it runs in a copy of the program's folder."""
    per_host: int
    """Concurrent programs per host."""
    timeout_s: float
    """Time limit of one try."""
    setup_timeout_s: float
    """Time limit of `setup`, and of waiting for a place at the host."""
    reward_timeout_s: float
    """Time limit of `reward`, and of a Harbor task's tests the longest that may be asked for."""
    grace_s: float
    """Seconds from SIGTERM to SIGKILL for a program over a limit."""
    idle_s: float
    """A program without an open call for this long is stuck."""
    max_calls: int
    """Model calls per episode."""
    max_tokens: int | None
    """Generated tokens per episode, all calls together; default: no bound."""
    on_crash: Literal['retry', 'score']
    """When a program fails after calling the model: retry: try again, and count the last try; score: count it at once. A stuck program is retried once."""
    failed_reward: float
    """Reward of an episode that failed, timed out, was stuck or crashed, and has no other."""
    image: str | None
    """Container image that podman or docker has on the hosts' machines: programs see its files, read-only, instead of the machine's, and `{python}` is its `python3`. Its user, folder and entry point are ignored."""
    network: Literal['model', 'open']
    """What a program reaches: only the model, or all that the machine does."""
    memory_mb: int
    """Memory of a program, all processes together."""
    processes: int
    """Concurrent processes and threads of a program."""
    disk_mb: int
    """Disk space of its folder, home and temporary folder."""
    environment: dict[str, str]
    """Further environment variables; of the host's own the program sees PATH, LANG and TZ."""
    read: list[str]
    """Further folders that the program may read, such as a virtual environment."""
    mcp: list[McpServerDict]
    """[MCP servers](mcp.md#agent-programs) for the program, written to the JSON file that `{mcp}` and TINKERMQ_MCP name. The program starts those with a `command` in its sandbox; a `url` needs `network: open`."""
    sampling: Literal['job', 'request']
    """job: sample as `rollout` says; request: with the program's temperature, top_p and top_k. Tokens drawn at other settings than the learner computes with are off-policy."""
    train: str
    """Which calls are trained: `all`, `main`, `/PATTERN/` or `not /PATTERN/` ([what is trained](train-an-agent.md#what-is-trained))."""
    reasoning: Literal['keep', 'template']
    """Earlier reasoning at the next user message: keep: its tokens stay; template: the history is rendered by the chat template, as a branch."""

class RolloutConfigDict(TypedDict, total=False):
    group_size: int
    """Episodes per task."""
    temperature: float
    """Sampling temperature, also for the learner's log-probs."""
    top_p: float
    """Nucleus sampling; log-probs are recorded before it."""
    top_k: int
    """Keep the k likeliest tokens; 0: all."""
    max_turns: int
    """Policy turns per episode."""
    max_prompt_tokens: int
    """A task with a longer first prompt fails."""
    max_turn_tokens: int
    """Generated tokens per turn."""
    max_response_tokens: int
    """Tokens after the first prompt, observations included."""
    max_tries: int
    """Tries of an episode before its task fails."""
    oversample: int
    """Episodes started beyond `group_size`: the first `group_size` to end are the group, the others are cut. This favours short episodes, measured by `rollout/oversample/*`."""

class GeneratorConfigDict(TypedDict, total=False):
    count: int
    """Generators that the pool runs; more can be added later."""
    slots: int
    """Slots per generator: linked GPUs of one node, or CPU shares."""
    engine: Literal['transformers', 'vllm']
    """Inference engine; vllm needs the extra `vllm` where generators run."""
    tensor_parallel: int
    """Slots per copy of the model, at most `slots`."""
    kv_cache_mb: int | None
    """KV cache; default: the rest of `memory_share` on a GPU, 1024 on a CPU."""
    memory_share: float | None
    """Share of a GPU's memory that a generator takes, all its engines together; default: 0.92 of its own GPU, on a shared one what fits beside the learner."""
    sleep: Literal['auto', 'always', 'never']
    """Whether the engine frees its memory while a learner on the same GPU trains; auto: if both do not fit."""
    kv_cache_dtype: Literal['auto', 'fp8']
    """fp8: twice the tokens in the cache; log-probs then differ from the learner's. Needs compute capability 8.9."""
    quantization: Literal['fp8'] | None
    """Quantise weights when they are loaded, and at each new version: faster and smaller, and log-probs differ from the learner's. fp8 needs compute capability 8.9."""
    batch_invariant: bool
    """Use kernels of vLLM whose results do not depend on what else is in the batch: slower. Needs compute capability 8.0."""
    prefix_caching: bool
    """Compute common beginnings of prompts once."""
    max_batched_tokens: int | None
    """Tokens per forward pass, those of prompts included; default: 16384 on a large GPU, else 8192."""
    compile: bool
    """Compile the model and record CUDA graphs: slower start, faster generation."""
    dtype: Literal['auto', 'float32', 'bfloat16']
    """Compute dtype of the engine. auto: bfloat16 on a GPU, float32 on CPUs."""
    max_episodes: int
    """Concurrent episodes per generator."""
    adapt_episodes: bool
    """Let the number of concurrent episodes follow the engine's free KV cache, up to `max_episodes` ([how](engines.md#episodes-and-the-cache))."""
    max_requests: int | None
    """Requests per forward pass; default: as many as the run has and the GPU's memory holds ([will it fit](gpu.md#will-it-fit)), 256 on a CPU."""
    max_context: int | None
    """Longest sequence; default: the longest episode of `rollout`."""
    kv_on_swap: Literal['keep', 'recompute']
    """KV caches of running requests at a weight swap."""
    ack_wait_s: float
    """Seconds of silence after which a task goes to another generator."""
    segment_tokens: int
    """Log running episodes after this many tokens and after each turn, so that another generator can continue them; 0: they start again."""
    threads: int
    """CPU threads for torch."""

class CorrectionMaskDict(TypedDict, total=False):
    over: Literal['token', 'sequence_sum', 'sequence_mean', 'sequence_max']
    """What is dropped: a token by its own value; all of a sequence by the sum (of ratios: the product) or the mean (the geometric one) of its tokens' values, or as soon as one of its tokens is out of bounds."""
    of: Literal['ratio', 'k1', 'k2', 'k3']
    """What is bounded: w, or an estimate of KL(π_b‖π_o): k1 = −log w, k2 = (log w)²/2, k3 = w − 1 − log w."""
    low: float | None
    """Dropped below this."""
    high: float | None
    """Dropped above this."""
    only: Literal['all', 'negative']
    """negative: only where the advantage is negative (DeepSeek-V3.2's off-policy mask is `{over: sequence_mean, of: k1, high: δ, only: negative}`)."""

class ReferenceConfigDict(TypedDict, total=False):
    path: str | None
    """Model with the policy's tokenizer, as `model.path`; default: what the run began with."""
    ema: float | None
    """After each step the reference becomes this share of itself and the rest of the policy; default: it stays."""
    reset_every: int
    """The reference becomes the policy after every so many steps; 0: never."""

class AlgorithmConfigDict(TypedDict, total=False):
    advantage: Literal['grpo', 'dr_grpo', 'gdpo', 'gpg', 'passk', 'rloo', 'reinforce_pp', 'reinforce_pp_baseline', 'remax', 'opo', 'maxrl', 'grpo_per_turn', 'grpo_per_step', 'gigpo', 'gae']
    """How rewards become advantages; gae is PPO and trains a critic."""
    advantage_std: Literal['group', 'batch', 'none']
    """Standard deviation that grpo and both parts of gigpo divide by; none: no division (gigpo's F_norm = 1); batch: grpo only."""
    reward_components: dict[str, float]
    """Weights of the numbers in the final `info` that gdpo adds up, each normalised in its group: `{correct: 1, format: 0.2}`."""
    gamma: float | None
    """Discount: per token for reinforce_pp and gae; per turn for grpo_per_turn, grpo_per_step, gigpo and turns as samples with returns. Default 1, for gigpo 0.95."""
    gae_lambda: float
    """λ of the generalised advantage: 1 trusts the rewards, 0 the critic."""
    gae_lambda_length: float | None
    """α of a length-dependent λ for the policy, 1 − 1 / (α · tokens), at least 0 (VAPO); the critic keeps `gae_lambda`."""
    turn_gamma: float | None
    """gae's discount from a turn's last token to the next turn; `gamma` then holds within turns."""
    turn_lambda: float | None
    """gae's λ from a turn's last token to the next turn, instead of `gae_lambda`."""
    step_weight: float
    """Weight of the advantage among turns with equal observations."""
    sample: Literal['episode', 'turn']
    """Unit that is rewarded and weighed: an episode, or each turn with the conversation before it as its prompt. Turns are compared by number within their group."""
    turn_reward: Literal['reward', 'return']
    """Reward of a turn as a sample: its own, or the discounted return from it."""
    branch_credit: Literal['episode', 'own', 'both']
    """Credit of an agent's branch with its own reward: the episode's; its own, compared with branches of its role in the group; or the sum of both advantages."""
    loss: Literal['ppo', 'gspo', 'gmpo', 'cispo', 'sapo', 'clip_cov', 'kl_cov', 'dppo', 'dppo_kl', 'topr', 'vespo', 'reinforce', 'sft']
    """Policy loss; SFT runs have sft, the cross entropy, by themselves."""
    clip_low: float | None
    """Lower clip; default 0.2 (ppo, clip_cov, dppo), 3e-4 (gspo), 0.4 (gmpo), 0.05 (dppo_kl), none (cispo, of the weight itself)."""
    clip_high: float | None
    """Upper clip; default 0.2 (ppo, clip_cov, dppo), 4e-4 (gspo), 0.4 (gmpo), 5 (cispo), 0.05 (dppo_kl)."""
    loss_options: dict[str, float]
    """Options of the loss besides its clips: `{tau_pos: 1, tau_neg: 1.05}` of sapo ([losses](training.md#losses))."""
    dual_clip: float
    """Bound of the loss at negative advantages."""
    correction: Literal['none', 'tis', 'icepop', 'geometric', 'mis', 'veto', 'decoupled', 'm2po']
    """Off-policy correction with the recorded behaviour log-probs; none for dppo, dppo_kl, topr and vespo, which correct themselves."""
    correction_level: Literal['token', 'sequence']
    """Truncate each token's weight, or that of the sequence."""
    correction_cap: float | None
    """Upper bound of weights, or of what is kept; default 2 (tis), 3 (mis), 5 (icepop), 1.01 (geometric), none (decoupled)."""
    correction_floor: float | None
    """Lower bound of what is kept; default 0.5 (icepop), 0.99 (geometric), 1e-4 (veto)."""
    correction_budget: float | None
    """Bound of the second moment of log w; default 0.04."""
    correction_masks: list[CorrectionMaskDict]
    """Further masks, each with its bounds."""
    correction_normalise: bool
    """Divide the weights by their batch mean; needs a forward pass before the update."""
    correction_denominator: Literal['all', 'kept']
    """Whether dropped tokens count in the divisor of losses; kept: they do not, which needs a forward pass before the update."""
    proximal: Literal['forward', 'loglinear']
    """Proximal policy: a forward pass before the update, or interpolation by version."""
    router_replay: bool
    """For mixtures of experts: record the experts of each token at generation and train with them (R3)."""
    kl_coef: float
    """Weight of the KL to the reference policy; 0: no reference is loaded."""
    kl_estimator: Literal['k1', 'k2', 'k3', 'k1+', 'k3+']
    """Estimator of the KL. k1 only in rewards, since its gradient in a loss is zero in expectation; k1+ and k3+ have the gradient of k2, the KL's."""
    kl_in: Literal['loss', 'reward']
    """Where the KL enters."""
    kl_importance: bool
    """Weigh the KL loss by π/π_b of each token, which makes it unbiased off-policy (DeepSeek-V3.2)."""
    reference: ReferenceConfigDict
    own_advantage: str | None
    """Your own advantage function, `module:function` or a registered name, with the inputs of `advantage` ([own algorithms](own-algorithms.md))."""
    own_loss: str | None
    """Your own policy loss, instead of `loss`."""
    own_correction: str | None
    """Your own off-policy weights, instead of `correction`; masks still apply."""
    own_mask: str | None
    """Your own mask of trained tokens, on top of the correction."""
    own_filter: str | None
    """Your own filter of trained groups; those left out give their admission credit back."""
    teacher: str | dict[str, str] | None
    """On-policy distillation: the model that scores the policy's tokens, or one per `data_source`, `""` for all others: a folder, URL, hub name, `RUN@STEP`, `job:NAME`, `https://HOST/v1?model=NAME` or `self` ([distillation](distillation.md))."""
    teacher_loss: Literal['reverse_kl', 'forward_kl']
    """reverse_kl: log π_teacher − log π_o of each drawn token is its advantage; forward_kl: KL(π_teacher‖π) over the teacher's likeliest tokens is a loss."""
    teacher_top_k: int
    """Likeliest tokens used by forward_kl; the rest counts as one event."""
    teacher_coef: float
    """Factor of the teacher's advantage or loss."""
    teacher_normalise: bool
    """Divide the advantage by its standard deviation over the batch."""
    teacher_context: str | None
    """What only the teacher reads: name of a text in the game's final `info` (such as a solution), appended to the first prompt."""
    teacher_context_tokens: int
    """Largest length of it; an episode with a longer one is given up."""
    reward_coef: float
    """Factor of the rewards' advantages beside a teacher; 0: the teacher alone, which allows `rollout.group_size: 1`."""
    entropy_coef: float
    """Weight of the entropy bonus; with `entropy_target` its initial value."""
    entropy_target: float | None
    """Target entropy per token, in nats: after a step below it the bonus's weight rises, else it falls, and it only counts below (Skywork-OR1)."""
    entropy_coef_step: float
    """Change of that weight per step."""
    entropy_share: float
    """Share of the batch's tokens that rewards train, those of the highest entropy; the rest still counts in divisors. Below 1 it needs a forward pass before the update."""
    loss_agg: Literal['token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm']
    """How token losses are aggregated."""
    loss_agg_length: int | None
    """Constant divisor; default `rollout.max_response_tokens`."""
    filter_equal_rewards: bool
    """Drop groups with equal rewards; each gives its admission credit back (DAPO)."""
    overlong_buffer: int
    """Soft penalty over the last tokens before the limit (`rollout.max_turn_tokens` for one-turn episodes, else `rollout.max_response_tokens`), by the tokens that the policy generated; 0: none."""
    overlong_factor: float
    """Largest overlong penalty, at the limit."""
    overlong_filter: bool
    """Leave episodes cut by a token limit out of all losses and their divisors (DAPO); their rewards still count in group mean and std."""
    length_coef: float
    """Reward episodes of a group with fewer generated tokens by up to half of this; unsolved ones (`evaluation.success_reward`) only lose by length (Kimi k1.5)."""

class CriticConfigDict(TypedDict, total=False):
    path: str | None
    """Model of its initial weights; default: the policy's initial ones."""
    lr: float
    """Peak learning rate, scheduled as `learner.schedule`."""
    gae_lambda: float | None
    """λ of the critic's returns; default: `algorithm.gae_lambda`."""
    bootstrap_cut: bool
    """Value the end of an episode that a turn or token limit cut by the critic instead of 0; needs one more pass over such episodes."""
    clip: float
    """Largest rewarded change of a value per update."""
    warmup_steps: int
    """First steps, in which only the critic is trained."""

class LearnerConfigDict(TypedDict, total=False):
    slots: int
    """Slots of the learner with all ranks: linked GPUs of one node, or CPU shares."""
    ranks: int
    """Processes that share model and batch (FSDP2), with equal parts of the slots."""
    machines: int
    """Nodes over which the ranks may be spread equally, as few as needed."""
    replicas: int
    """Copies of the model among the ranks (HSDP), each sharded over ranks / replicas of them; only gradients travel between copies."""
    context_parallel: int
    """Neighbouring ranks that share the columns of each row (Ulysses), so that each holds activations of a part. Must divide the ranks and the model's heads."""
    optimizer: Literal['adamw', 'muon']
    """adamw; muon: the momentum of the hidden layers' matrices, an adapter's too, made orthogonal, with AdamW for embeddings, output layer, norms and biases."""
    lr: float
    """Peak learning rate; muon's updates are as large as AdamW's at the same rate."""
    schedule: Literal['constant', 'linear', 'cosine']
    """Learning rate after the warm-up."""
    warmup_steps: int
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: float
    """Final learning rate, as a share of the peak."""
    betas: tuple[float, float] | list[float]
    """AdamW."""
    eps: float
    """AdamW."""
    weight_decay: float
    """Weight decay, times the learning rate."""
    muon_momentum: float
    """Momentum (Nesterov)."""
    grad_clip: float
    """Largest gradient norm."""
    num_minibatches: int
    """Optimiser updates per batch and version, each on a part of it."""
    ppo_epochs: int
    """Passes over a batch, with `num_minibatches` updates each; ratios and clips are relative to the policy before the first."""
    dtype: Literal['auto', 'float32', 'bfloat16']
    """Compute dtype; master weights, gradients and optimiser state are float32. auto: bfloat16 on a GPU, float32 on CPUs."""
    publish_dtype: Literal['auto', 'float32', 'bfloat16']
    """Dtype of the weights that generators get. auto: that of `generator.dtype`."""
    deterministic: bool
    """Use deterministic CUDA kernels only, so that `tinkermq replay` arrives at the same bits on a GPU: slower. On CPUs results always have the same bits."""
    max_row_tokens: int
    """Sequences are packed into rows of up to this many tokens."""
    microbatch_tokens: int | Literal['auto']
    """Tokens per forward and backward pass; gradients are accumulated. auto: as many as the GPU is estimated to hold (`tinkermq plan`); on a CPU 16384, or `max_row_tokens` if that is more."""
    share_prompts: bool
    """Compute common beginnings of sequences once, if they fit into a row of `max_row_tokens`, a multiple of the longest episode (same result)."""
    gradient_checkpointing: bool | Literal['auto']
    """Recompute activations in the backward pass to save memory. auto: where the GPU is estimated to hold few tokens otherwise; not on a CPU."""
    offload_activations: bool | Literal['auto']
    """Keep the inputs of recomputed layers in the machine's memory until the backward pass. auto: where the GPU is estimated to hold no pass otherwise; not on a CPU. Implies `gradient_checkpointing`."""
    compile: bool
    """Use torch.compile for the model's layers: a minute or more at first use, equal results up to rounding. Needs a C++ compiler."""
    cpu_offload: bool
    """Keep master weights, gradients and optimiser state in CPU memory: slower; needs a GPU."""
    threads: int
    """CPU threads for torch, of each rank."""

class LoraConfigDict(TypedDict, total=False):
    rank: int
    """Rank; 0: all weights are trained."""
    alpha: int
    """Adapters are scaled by alpha / rank."""
    targets: Literal['all-linear'] | list[str]
    """Names of the adapted linear layers (`[q_proj, v_proj]`); all-linear: all but the output layer, MLPs of a model with experts, and state spaces' `out_proj` ([families](models.md))."""
    exclude: list[str]
    """Names of layers without an adapter."""
    rank_pattern: dict[str, int]
    """Other ranks by the end of a layer's name, or a regular expression, as in PEFT: `{layers.0.self_attn.q_proj: 4}`."""
    alpha_pattern: dict[str, float]
    """Other alphas, named as in `rank_pattern`."""
    rslora: bool
    """Scale by alpha / √rank (rank-stabilised, arXiv 2312.03732)."""
    dropout: float
    """Dropout of the adapters' inputs in updates; log-probs are computed without."""

class SftConfigDict(TypedDict, total=False):
    data: list[str]
    """Parquet or JSONL files with [conversations](training.md#from-conversations) in the column `messages`, and optionally `tools` and `images`. Empty: not an SFT run."""

class TinkerConfigDict(TypedDict, total=False):
    base: str
    """Name of the base model for programs (`base_model`), such as `Qwen/Qwen3.5-9B-Base`, or an absolute path. Empty: no such service."""
    max_rank: int
    """Largest rank of an adapter."""
    adapters_in_memory: int
    """Adapters, with optimisers, in the trainer's memory; the least recently used are written to disk and return with their next operation."""
    adapters_mb: int
    """Megabytes of these: weights, gradients and two moments each."""
    idle_s: float
    """Seconds after which an unused adapter is written to disk."""
    sampled_at_once: int
    """Adapters that one sampler holds and decodes in one batch; users take them in turn."""
    checkpoint_mb: int
    """Megabytes of checkpoints per user; saving fails beyond."""
    micro_batch_tokens: int
    """Tokens of one model computed at once."""
    mixed_micro_batches: bool
    """Compute micro-batches of several models in one pass: faster for many small ones ([how bits are kept](tinker.md#many-users))."""

class TrainingConfigDict(TypedDict, total=False):
    num_steps: int | None
    """Optimiser steps."""
    num_epochs: int | None
    """Passes over the training data, in place of `num_steps`; without either, one."""
    batch_size: int
    """Tasks per step."""
    max_staleness: int | Literal['auto']
    """Largest lag of trained groups (see `staleness_policy`); 0: on-policy; auto: chosen from measured times, from 1 to `staleness_limit`."""
    staleness_limit: int
    """Largest bound that auto may choose."""
    staleness_policy: Literal['drop', 'wait', 'train', 'mask']
    """Groups over the bound ([what each does](training.md#staleness))."""
    curriculum: Literal['none', 'success_rate']
    """Task order: none: shuffled, each once per epoch; success_rate: prefer tasks solved about half of the time."""
    curriculum_uniform: float
    """Share of tasks chosen regardless of success rate."""
    own_curriculum: str | None
    """Your own function that weighs tasks by how often each was tried and solved ([own algorithms](own-algorithms.md))."""
    curriculum_tasks: int | None
    """Number of seeds to choose from, for a game that generates its states."""
    tasks: Literal['data', 'external']
    """Tasks come from the data, or only from clients that publish tasks or trajectories."""
    test_freq: int
    """Validate every N steps; 0: only before and after training."""
    validate_before_training: bool
    """Validate the initial weights."""
    save_freq: int
    """Checkpoint every N steps, and at the end; 0: only by `save_minutes`."""
    save_minutes: float
    """Checkpoint also when the last is this old, which bounds the work that a dying learner loses. Less often if writing takes over a tenth of that time; 0: never."""
    keep_last: int
    """Newest checkpoints to keep; with 1 there is none to fall back on if it is damaged. The rollout log goes back to the second newest, unless it fills three quarters of `limits.rollout_bytes`."""
    keep_every: int
    """Keep checkpoints of every N steps for good; 0: none."""
    keep_best: bool
    """Write a checkpoint at each validated step, and keep the best by mean score: `RUN@best`, link `best` in the run folder. An episode that a validation lacks counts as the worst of all of them."""
    keep_rollouts: bool
    """Never trim the rollout log, so that the run can be replayed. Otherwise only the newest groups remain at its end."""
    kept_rollout_bytes: int
    """Bytes of rollouts kept in the run folder for people, beyond the log: half for the newest, half for samples of each checkpoint's steps; 0: none."""

class EvaluationConfigDict(TypedDict, total=False):
    slots: int
    """Slots of a separate evaluator; 0: the generators validate. A job without generators, or of kind `eval`, has an evaluator with `generator.slots`."""
    deadline_s: float
    """Longest time for which a generator stays at a version to validate it. Episodes that have not ended by then count as failed."""
    samples: int
    """Episodes per validation task; more than 1 gives pass@k."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_p: float
    """Nucleus sampling."""
    success_reward: float
    """A return above this is a success, unless `info["success"]` says otherwise."""
    data: Literal['val', 'train']
    """The validation set, or the rows of `env.train_data` in order."""
    reset_kwargs: dict[str, Any]
    """Further arguments of `reset` in validation, such as another opponent."""
    tasks: list[int] | None
    """Fixed list of rows or seeds; default: all."""

class SelfPlayConfigDict(TypedDict, total=False):
    past_share: float
    """Share of tasks in which one role learns and an earlier version plays the others; in the rest all roles learn."""
    pool_every: int
    """Keep versions of every N steps as opponents, the first included."""
    pool_size: int
    """Newest of them to play against."""
    redraw_every: int
    """Versions after which a generator draws another opponent."""

class WeightsConfigDict(TypedDict, total=False):
    transport: Literal['auto', 'object', 'file', 'nccl']
    """object: through NATS; file: a shared folder; nccl: [from memory to memory](architecture.md#from-memory-to-memory); auto: nccl where learner and generators have GPUs (in a pool with users: share one), else object."""
    folder: str | None
    """The shared folder; default: the run folder."""
    chunk_bytes: int
    """Size of one message."""
    differences: bool
    """Send 16-bit weights as differences where smaller; learner and generators then hold two versions in memory."""
    full_snapshot_every: int
    """Every N versions one is stored whole, for receivers that join or were away."""
    sha256: bool
    """Also compute the SHA-256 that `nats object get` requires; without CPU instructions for it, this takes longer than sending."""
    shared_bytes: int
    """Space in each machine's /dev/shm in which the run's actors share a version, at most half of what is free. 0: each reads for itself."""

class StorageConfigDict(TypedDict, total=False):
    url: str | None
    """Also keep checkpoints below this URL (`s3://bucket/prefix`, `gs://`, `file:///folder`, or `broker:` for the broker), so that a learner on another machine can continue ([without a shared disk](clusters.md#without-a-shared-disk))."""

class LimitsConfigDict(TypedDict, total=False):
    task_bytes: int
    """Task queue."""
    rollout_bytes: int
    """Rollout log; generators wait while it is full."""
    segment_bytes: int
    """Running episodes, with `generator.segment_tokens` or programs; the rest is not logged."""
    operation_bytes: int
    """Operations of Tinker programs, and their results, each; results are kept for a day, the oldest go first."""
    checkpoint_bytes: int
    """Checkpoints in the broker (`storage.url: "broker:"`): room for `training.keep_last` + 2, one more with `training.keep_best`."""
    log_bytes: int
    """Log lines, metrics and events, and traces, each; the oldest go first."""
    max_restarts: int
    """Failures of one actor within ten minutes, or in a row without any finished work (a step, group, evaluation or answer), after which the run fails."""
    max_node_failures: int
    """Nodes that the run may lose before it fails."""
    untrainable_groups: int | None
    """Untrainable groups in a row (equal returns, filtered, stale, malformed) that end the run with a checkpoint; default: 20 batches, at least 256; 0: never."""
    idle_s: float
    """Seconds without a finished task after which the run ends with a checkpoint and frees its slots."""

class JobConfigDict(TypedDict, total=False):
    name: str | None
    """Name: lower-case letters, digits, `-` and `_`; default `<env>-<model>-<two words>`."""
    tags: list[str]
    """Tags for lists and search; `tinkermq label` changes them later."""
    group: str | None
    """Group of related runs, such as a sweep."""
    notes: str
    """Notes for people."""
    seed: int
    """Seed of data order, episodes and optimiser."""
    output_dir: str
    """Parent of run folders, on the pool."""
    logger_backends: list[Literal['console', 'jsonl', 'tensorboard', 'wandb', 'wandb-offline', 'trackio', 'mlflow']]
    """Where metrics go besides the broker; always jsonl."""
    project: str
    """Project at the experiment tracker."""
    tracking: TrackingConfigDict
    model: ModelConfigDict
    env: EnvConfigDict
    agent: AgentConfigDict
    rollout: RolloutConfigDict
    generator: GeneratorConfigDict
    algorithm: AlgorithmConfigDict
    critic: CriticConfigDict
    learner: LearnerConfigDict
    lora: LoraConfigDict
    sft: SftConfigDict
    tinker: TinkerConfigDict
    training: TrainingConfigDict
    evaluation: EvaluationConfigDict
    policies: dict[str, str]
    """Models of roles with their own policy; `model` plays all others."""
    self_play: SelfPlayConfigDict
    weights: WeightsConfigDict
    storage: StorageConfigDict
    limits: LimitsConfigDict
    placement: Literal['auto', 'separate', 'colocated']
    """separate: learner and generators hold slots of their own; colocated: learner and generator share one GPU ([on one GPU](gpu.md#on-one-gpu)); auto: colocated in a pool of one GPU."""
