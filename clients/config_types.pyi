# Written by `make docs` from schemas/config/: change that, not this file.
"""The configuration of a job as typed dictionaries: every key is optional."""

from typing import Any, Literal, TypedDict

class TrackingConfigDict(TypedDict, total=False):
    entity: str | None
    """Team or user of wandb; default: that of the key."""
    episodes_every: int
    """Every so many steps, episodes of the step as a table: their messages, reward and version; 0: never."""
    max_episodes: int
    """Episodes in such a table."""
    checkpoints: bool
    """Keep each checkpoint there, too: an artifact of wandb or MLflow."""

class ModelConfigDict(TypedDict, total=False):
    path: str
    """Hugging Face folder, or the name of a model on the hub."""
    tokenizer: str | None
    """Folder of the tokenizer; default: the model's own."""
    attn_implementation: Literal['sdpa', 'flash_attention_2']
    """Attention kernel of the learner; flash_attention_2 needs a GPU, the `flash-attn` extra and `learner.dtype=bfloat16`, and computes a shared prompt once for each of its episodes, and what rows of an agent's episode have in common once for each row."""
    trust_remote_code: bool
    """Run code that comes with the model."""
    template_kwargs: dict[str, Any]
    """Arguments of the chat template (`enable_thinking: false`), the same at every turn."""

class RewardConfigDict(TypedDict, total=False):
    source: Literal['game', 'function', 'endpoint', 'judge']
    """The game alone, a Python function, an HTTP endpoint, or a model that judges."""
    per: Literal['episode', 'turn']
    """Asked once at the end of the episode, or after every turn."""
    weight: float
    """Factor of what the source says."""
    game_weight: float
    """Factor of the game's own rewards, which are added."""
    function: str | None
    """`package.module:function`, called as verl calls its own: `data_source`, `solution_str`, `ground_truth`, `extra_info`, and `messages` and `info` where it takes them. It may be `async def`: all its calls then wait in one event loop."""
    url: str | None
    """Where the same is posted as JSON; of a judge, the base URL of an OpenAI-compatible API."""
    key_variable: str | None
    """Environment variable of the environment host that holds the key for `url`."""
    judge: str | None
    """Inference job that judges, by id or name, asked through the broker; or the model's name at `url`."""
    judge_prompt: str | None
    """What the judge reads: `$question` is the first user message, `$answer` the policy's last one, `$ground_truth` the row's, `$conversation` all of it, `$scale` the best score. Default: grade the answer. Its reply must end with a line `Score: N`, N a plain number, and is refused without one: `$form` is the sentence that demands it, and a prompt that names neither is refused."""
    judge_scale: float
    """The judge's best score, which earns 1."""
    judge_tokens: int
    """Tokens that the judge may write; a reply that they cut is refused."""
    judge_request: dict[str, Any]
    """Further fields of the requests to a judge at `url`, such as `reasoning_effort`; null takes one of ours out: `{max_tokens: null}`. Where the API names `max_tokens` or `temperature` as what it refuses, it is asked with `max_completion_tokens`, or without a temperature."""
    timeout_s: float
    """Longest time that one reward may take, all tries together."""
    tries: int
    """Tries while the endpoint or the judge cannot be reached, is busy or is slow."""
    max_requests: int
    """Rewards that one host works out at the same time."""

class EnvConfigDict(TypedDict, total=False):
    game: str
    """Registered name (`tinkermq env list`) or `package.module:Class`; empty: callers bring one."""
    kwargs: dict[str, Any]
    """Arguments of the game's constructor."""
    train_data: list[str]
    """Parquet or JSONL files of a dataset game; empty for a game that generates its states."""
    val_data: list[str]
    """Validation files of a dataset game."""
    num_val: int
    """Validation tasks: the first rows of `val_data` after a seeded shuffle, or generated seeds."""
    hosts: int
    """Environment hosts that the pool runs; 0: the client hosts the game (`GameEnvironment`)."""
    workers: int
    """Games that step at the same time in one host."""
    isolation: Literal['thread', 'process'] | None
    """Where games run; default: as the game's class says (`isolation`), threads where it says nothing. A hung game in a process is killed; in a thread it can only be given up."""
    worker_memory_mb: int | None
    """Memory that the games of one worker process may use, beyond what it takes to load them; one that wants more fails its episode. Default: no bound."""
    reset_timeout_s: float
    """A reset that takes longer fails its episode."""
    step_timeout_s: float
    """A step that takes longer fails its episode, or ends it as `on_step_timeout` says."""
    on_step_timeout: Literal['retry', 'penalty', 'mask']
    """What an episode becomes whose step takes too long. retry: it has failed, and is played again. penalty: it has ended, its last turn is rewarded with `step_timeout_reward` and it is trained, for the policy's action is to blame. mask: it has ended, is in the rollout log, and is neither trained nor compared with. Under the last two games run in processes, which can be ended, unless `isolation` is thread or the game is async."""
    step_timeout_reward: float
    """Reward of a turn whose step takes too long, in place of all others of that turn."""
    reward: RewardConfigDict
    lease_s: float
    """An episode that is neither stepped nor closed for this long is freed."""

class AgentConfigDict(TypedDict, total=False):
    command: list[str]
    """What is run for each episode: a program and its arguments. `{prompt}`, `{workdir}`, `{input}` and `{python}` stand for the task's last user message, the folder that it runs in, the file with the task's row, and the pool's interpreter. Empty: no agent job, or `client`."""
    client: bool
    """Episodes are run by whoever calls `AgentEpisodes` or hosts a Python function, with `env.hosts=0`, the default then; with `env.hosts=1` by whoever asks a gateway for them at `/v1/episodes`."""
    files: str | None
    """Folder whose copy is the program's folder, a fresh one for each try; default: an empty folder. Like all folders here it is relative to where the job is submitted, or, with `env.hosts=0`, to where `tinkermq agent host` runs."""
    setup: list[str]
    """Command that is run there before the program, with the program's walls."""
    reward: list[str]
    """Command that is run when all processes of the program are dead; it writes a number, or an object with `reward` and perhaps `success` and `info`, as the last line it prints."""
    reward_files: str | None
    """Folder that only the reward command sees, as `{grader}`; it runs in a copy of the program's folder."""
    per_host: int
    """Programs of one host at the same time."""
    timeout_s: float
    """How long one try of an episode may take."""
    setup_timeout_s: float
    """How long `setup` may take, and the wait for a place at the host."""
    reward_timeout_s: float
    """How long `reward` may take."""
    grace_s: float
    """Time between SIGTERM and SIGKILL for a program that is over a limit."""
    idle_s: float
    """A program that has no call open and makes none for so long is stuck."""
    max_calls: int
    """Calls of the model in one episode."""
    max_tokens: int | None
    """Tokens that the model may generate in one episode, all its calls together; default: no bound."""
    on_crash: Literal['retry', 'score']
    """A program that exits with an error after it has called the model: another try, and the last one counts; or what it has done counts at once. One that is stuck is tried again once."""
    failed_reward: float
    """Reward of an episode that failed, ran out of time, was stuck or crashed and has no other."""
    image: str | None
    """Image of a container that podman or docker has on the hosts' machines: programs see its files, read-only, in place of the machine's, and `{python}` is its `python3`. Its variables are set; its user, folder and entry point have no effect."""
    network: Literal['model', 'open']
    """What a program reaches: the model and nothing else, or whatever the machine does."""
    memory_mb: int
    """Memory of a program with all its processes."""
    processes: int
    """Processes and threads of a program at the same time."""
    disk_mb: int
    """Room in its folder, its home and its temporary folder."""
    environment: dict[str, str]
    """Further environment variables of the program; of the host's own it sees PATH, LANG and TZ."""
    read: list[str]
    """Further folders that the program may read, such as an environment with its packages."""
    sampling: Literal['job', 'request']
    """Whether `rollout` says how tokens are drawn, or the program's own temperature, top_p and top_k do where it sends them: what is drawn otherwise than the learner computes is off-policy."""
    train: str
    """Which calls are trained, with the episode's reward: `all` whose answer arrived, those of the `main` conversation, `/PATTERN/`: those of conversations in whose system message (where there is none: whose first message) the regular expression is found, `not /PATTERN/`: those of all others, or `alive`: those that can have had a part in the outcome."""
    reasoning: Literal['keep', 'template']
    """What becomes of earlier reasoning when a user speaks again: its tokens stay as they were drawn, or the history is rendered as the chat template has it, as a branch."""

class RolloutConfigDict(TypedDict, total=False):
    group_size: int
    """Episodes per task."""
    temperature: float
    """Sampling temperature; the learner computes log-probs at the same."""
    top_p: float
    """Nucleus sampling; log-probs are recorded before it."""
    top_k: int
    """Keep the k likeliest tokens; 0: all."""
    max_turns: int
    """Answers of the policy per episode; each one reaches the game."""
    max_prompt_tokens: int
    """A first prompt longer than this fails its task."""
    max_turn_tokens: int
    """Tokens the policy may generate in one turn; binds at generation."""
    max_response_tokens: int
    """Tokens after the first prompt, observations included; binds at generation."""
    max_tries: int
    """Tries of one episode before its task is given up."""
    oversample: int
    """Episodes of a task that are started beyond `group_size`: the first `group_size` to end are its group, the others are cut. This favours short episodes; `rollout/oversample/*` tells by how much."""

class GeneratorConfigDict(TypedDict, total=False):
    count: int
    """Generators the pool runs for this job; more can be added while it runs."""
    slots: int
    """Slots that each generator holds: linked GPUs of one node, or CPU shares."""
    engine: Literal['transformers', 'vllm']
    """What generates; vllm needs the `vllm` extra where generators run."""
    tensor_parallel: int
    """Slots that hold one copy of the model together, at most `slots`."""
    kv_cache_mb: int | None
    """Memory of the KV cache; default: what vLLM finds free on a GPU, 1024 on a CPU."""
    compile: bool
    """Compile the model and record CUDA graphs: starts later, generates faster."""
    dtype: Literal['float32', 'bfloat16']
    """Compute dtype of the engine."""
    max_episodes: int
    """Episodes that run at the same time in one generator."""
    max_requests: int
    """Requests that decode in one forward pass."""
    max_context: int | None
    """Longest sequence that the engine takes; default: the longest episode of `rollout`."""
    kv_on_swap: Literal['keep', 'recompute']
    """What becomes of the cache of running requests at a weight swap."""
    ack_wait_s: float
    """A task is given to another generator this long after its holder was last heard of."""
    segment_tokens: int
    """Write running episodes down after so many tokens, and after each turn, so that another generator goes on with them when this one dies; 0: they start again."""
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
    """How rewards become advantages; gae is PPO and trains a critic beside the policy."""
    advantage_std: Literal['group', 'batch', 'none']
    """Whose standard deviation grpo and both parts of gigpo divide by; none: by nothing (gigpo's F_norm = 1). batch is grpo's alone."""
    reward_components: dict[str, float]
    """What gdpo adds up, with weights: numbers that the game tells in `info` at an episode's end, each normalised in its group by itself, so that none drowns the others. `{correct: 1, format: 0.2}`."""
    gamma: float | None
    """Discount: per token for reinforce_pp and gae, per turn for grpo_per_turn, grpo_per_step, gigpo and turns as samples that earn what follows them (per turn only, then); default 1, for gigpo 0.95."""
    gae_lambda: float
    """λ of the generalised advantage: 1 trusts the rewards, 0 the critic."""
    gae_lambda_length: float | None
    """α of a λ for the policy's advantages that grows with the sample, in place of `gae_lambda`, which stays the critic's: 1 − 1 / (α · tokens), at least 0 (VAPO)."""
    turn_gamma: float | None
    """Discount of gae from a turn's last token to the next turn, in place of `gamma`, which is then that between the tokens of a turn."""
    turn_lambda: float | None
    """λ of gae from a turn's last token to the next turn, in place of `gae_lambda`."""
    step_weight: float
    """Weight of the advantage among turns that answer equal observations."""
    sample: Literal['episode', 'turn']
    """What is rewarded and weighed as one: an episode, or each of its turns with the conversation before it as its prompt. Turns are compared with those of the same number in their group."""
    turn_reward: Literal['reward', 'return']
    """What a turn as a sample earns: its own reward, or that and the later ones discounted."""
    branch_credit: Literal['episode', 'own', 'both']
    """What an agent's branch with a reward of its own is credited with: the episode's, as all else; its own, compared with the branches of its role in the group; or the sum of both advantages."""
    loss: Literal['ppo', 'gspo', 'gmpo', 'cispo', 'sapo', 'clip_cov', 'kl_cov', 'dppo', 'dppo_kl', 'topr', 'vespo', 'reinforce', 'sft']
    """Policy loss; SFT jobs have sft, the cross entropy, by themselves."""
    clip_low: float | None
    """Lower clip; default 0.2 (ppo, clip_cov, dppo), 3e-4 (gspo), 0.4 (gmpo), 0.05 (dppo_kl), none (cispo, of the weight itself)."""
    clip_high: float | None
    """Upper clip; default 0.2 (ppo, clip_cov, dppo), 4e-4 (gspo), 0.4 (gmpo), 5 (cispo), 0.05 (dppo_kl)."""
    loss_options: dict[str, float]
    """What the loss has beside its clips, by name: `{tau_pos: 1, tau_neg: 1.05}` of sapo ([losses](training.md#losses))."""
    dual_clip: float
    """Bound of the loss for negative advantages."""
    correction: Literal['none', 'tis', 'icepop', 'geometric', 'mis', 'veto', 'decoupled', 'm2po']
    """Off-policy correction by the recorded behaviour log-probs; none for dppo, dppo_kl, topr and vespo, which correct for them by themselves."""
    correction_level: Literal['token', 'sequence']
    """Truncate each token's weight, or the product over the sequence."""
    correction_cap: float | None
    """Upper bound of the weight, or of what is kept; default 2 (tis), 3 (mis), 5 (icepop), 1.01 (geometric), none (decoupled)."""
    correction_floor: float | None
    """Lower bound of what is kept; default 0.5 (icepop), 0.99 (geometric), 1e-4 (veto)."""
    correction_budget: float | None
    """Bound of the second moment of log w; default 0.04."""
    correction_masks: list[CorrectionMaskDict]
    """Masks beside what the correction itself drops: any number, each with its bounds."""
    correction_normalise: bool
    """Divide the weights by their mean over the batch; needs a forward pass before the update."""
    correction_denominator: Literal['all', 'kept']
    """Whether tokens that are dropped count in what losses are divided by; kept, where they do not, needs a forward pass before the update."""
    proximal: Literal['forward', 'loglinear']
    """Proximal policy: a forward pass before the update, or interpolated by version."""
    router_replay: bool
    """Of a mixture of experts: record which experts read each token as it is generated, and train with those (R3), so that generator and learner compute with the same experts."""
    kl_coef: float
    """Weight of the KL to the reference policy; 0: none is loaded."""
    kl_estimator: Literal['k1', 'k2', 'k3', 'k1+', 'k3+']
    """Estimator of the KL; k1 in rewards only, its gradient in a loss is zero in expectation. k1+ and k3+ have the gradient of k2, which is that of the KL."""
    kl_in: Literal['loss', 'reward']
    """Where the KL enters."""
    kl_importance: bool
    """Weigh the KL in the loss by π/π_b of each token, which makes its estimate unbiased where the policy has moved from what drew the token (DeepSeek-V3.2)."""
    reference: ReferenceConfigDict
    own_advantage: str | None
    """An advantage of one's own in the place of the one named, whose inputs it gets: `module:function`, or the name under which a package has registered it, found where the learner runs ([own algorithms](own-algorithms.md))."""
    own_loss: str | None
    """A policy loss of one's own in the place of `loss`."""
    own_correction: str | None
    """Off-policy weights of one's own in the place of `correction`'s; masks are laid over them."""
    own_mask: str | None
    """A mask of one's own, laid over the correction: which tokens are trained."""
    own_filter: str | None
    """A filter of one's own: which groups are trained; those left out give their admission credit back."""
    teacher: str | dict[str, str] | None
    """On-policy distillation: the model that says of each token that the policy drew how likely it was; several by the data source of the rows that each teaches, `""` for all others. It is named by folder, URL of a store, name of the hub, or `RUN@STEP`; `job:NAME` is a job that serves, `https://HOST/v1?model=NAME` an API, `self` the policy with a `teacher_context`. It must have the policy's tokenizer ([distillation](distillation.md))."""
    teacher_loss: Literal['reverse_kl', 'forward_kl']
    """How it teaches: by log π_teacher − log π_o of each token that was drawn, as its advantage; or by KL(π_teacher‖π) over its likeliest tokens in the place of each, as a loss."""
    teacher_top_k: int
    """Likeliest tokens that forward_kl looks at; all others are taken as one event."""
    teacher_coef: float
    """What the advantage, or the loss, of a teacher is multiplied by."""
    teacher_normalise: bool
    """Divide the advantage by its standard deviation over the batch."""
    teacher_context: str | None
    """What the teacher reads and the policy does not: the name of a text that the game tells in `info` at an episode's end (a solution, say), which stands at the end of the first prompt."""
    teacher_context_tokens: int
    """Tokens by which it may make the prompt longer; an episode with a longer one is given up."""
    reward_coef: float
    """What the advantages of rewards are multiplied by beside a teacher's; 0: it teaches alone, and `rollout.group_size: 1` will do."""
    entropy_coef: float
    """Weight of the entropy bonus; with `entropy_target` that of the first step."""
    entropy_target: float | None
    """Entropy of a token, in nats, at which the policy is held: after a step below it the weight of the bonus rises, after others it falls, and it counts only below (Skywork-OR1)."""
    entropy_coef_step: float
    """How far the weight of the entropy bonus rises or falls after a step."""
    entropy_share: float
    """Share of the batch's tokens that rewards train: those with the highest entropy. The others count in what losses are divided by. Below 1 it needs a forward pass before the update."""
    loss_agg: Literal['token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm']
    """How token losses become one number."""
    loss_agg_length: int | None
    """Constant length that divides; default `rollout.max_response_tokens`."""
    filter_equal_rewards: bool
    """Drop groups whose rewards are all equal; each gives its admission credit back (DAPO)."""
    overlong_buffer: int
    """Soft penalty over the last so many tokens before the limit (`rollout.max_turn_tokens` of an episode of one turn, else `rollout.max_response_tokens`); 0: none."""
    overlong_factor: float
    """Largest overlong penalty: that of an episode which a token limit ended."""
    overlong_filter: bool
    """Leave episodes that a token limit ended out of the losses, the critic's too, and out of what those are divided by (DAPO); their rewards still count in their group's mean and std."""
    length_coef: float
    """Reward the shorter episodes of a group, by up to half of this; those that are not solved (`evaluation.success_reward`) only lose by being long (Kimi k1.5)."""

class CriticConfigDict(TypedDict, total=False):
    path: str | None
    """Model whose weights it starts from; default: the policy's initial ones."""
    lr: float
    """Peak learning rate; it rises and falls as `learner.schedule` says."""
    gae_lambda: float | None
    """λ of the returns that it is trained towards; default: `algorithm.gae_lambda`."""
    bootstrap_cut: bool
    """An episode that a limit of turns or tokens ended is worth at its end what the critic expects there, in place of 0: its game would have gone on. One more pass over such episodes."""
    clip: float
    """An update is not rewarded for moving a value further than this from where it was."""
    warmup_steps: int
    """First steps, in which only the critic is trained and the policy stays as it is."""

class LearnerConfigDict(TypedDict, total=False):
    slots: int
    """Slots that the learner holds with all its ranks: linked GPUs of one node, or CPU shares."""
    ranks: int
    """Actors over which model and batch are divided (FSDP2), each with as many of the slots."""
    machines: int
    """Nodes over which the ranks may lie in equal parts. One is taken where one can hold them all; a copy of the model (`replicas`) is never divided over more of them than it must."""
    replicas: int
    """Copies of the model among the ranks (HSDP): each is divided over ranks / replicas of them, which have neighbouring slots; between copies only gradients travel."""
    context_parallel: int
    """Neighbouring ranks that compute the columns of each row together (Ulysses): a rank holds the activations of a part of it. It divides the number of ranks, and those of the model's heads."""
    optimizer: Literal['adamw', 'muon']
    """adamw; muon: the momentum of the hidden layers' matrices, an adapter's too, made orthogonal, with AdamW for embeddings, output layer, norms and biases."""
    lr: float
    """Peak learning rate; muon's updates are as large as AdamW's at the same rate."""
    schedule: Literal['constant', 'linear', 'cosine']
    """Learning rate after the warm-up."""
    warmup_steps: int
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: float
    """Learning rate at the last step, as a share of the peak."""
    betas: tuple[float, float] | list[float]
    """AdamW."""
    eps: float
    """AdamW."""
    weight_decay: float
    """Share of each weight that an update takes away, times the learning rate."""
    muon_momentum: float
    """Share of the momentum that stays from update to update (Nesterov)."""
    grad_clip: float
    """Largest gradient norm."""
    num_minibatches: int
    """Optimiser updates per batch, each on a part of it; all of them make one version."""
    batch_epochs: int
    """Times that a batch is gone through, with `num_minibatches` updates each; ratios and clips are those to the policy before the first."""
    dtype: Literal['float32', 'bfloat16']
    """Compute dtype; master weights and optimiser state are float32."""
    publish_dtype: Literal['float32', 'bfloat16']
    """Dtype of the weights that generators get."""
    row_tokens: int
    """Sequences are packed into rows of at most this many tokens."""
    microbatch_tokens: int
    """Tokens of one forward and backward pass; the rest is accumulated."""
    share_prompts: bool
    """Compute the prompt of a group once, not once per episode, and what rows of an agent's episodes begin with in common once, too, as far as they fit into a row of `row_tokens`: some multiple of the longest episode (same result; sdpa only)."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass to save memory."""
    compile: bool
    """Translate the model's layers by torch.compile at their first use, which takes a minute or more: same results but for rounding, in fewer and larger kernels. Needs a C++ compiler."""
    cpu_offload: bool
    """Keep master weights, gradients and optimiser state in the memory of the machine, not the GPU's: slower, and refused without a GPU."""
    threads: int
    """CPU threads for torch, of each rank."""

class LoraConfigDict(TypedDict, total=False):
    rank: int
    """Rank of the adapters; 0: all weights are trained."""
    alpha: int
    """What an adapter adds is multiplied by alpha / rank."""
    targets: Literal['all-linear'] | list[str]
    """Names of the linear layers that get an adapter (`[q_proj, v_proj]`); all-linear: every one but the output layer."""
    exclude: list[str]
    """Names of layers that get none all the same."""
    rank_pattern: dict[str, int]
    """Other ranks for some layers, by the end of a layer's name or a regular expression of it, as PEFT's: `{layers.0.self_attn.q_proj: 4}`."""
    alpha_pattern: dict[str, float]
    """Other alphas for some layers, named as in `rank_pattern`."""
    rslora: bool
    """Multiply by alpha / √rank instead of alpha / rank (rank-stabilised, arXiv 2312.03732)."""
    dropout: float
    """Share of an adapter's inputs that is left out at each update; log-probs are taken without."""

class SftConfigDict(TypedDict, total=False):
    data: list[str]
    """Parquet or JSONL files, on the pool, with the column `messages`: conversations in which the assistant's messages are learnt; `tools` and `images` may stand beside it. Empty: not an SFT job."""

class TinkerConfigDict(TypedDict, total=False):
    base: str
    """Name under which programs ask for the base model (`base_model`), such as `Qwen/Qwen3.5-9B-Base`; an absolute path is a name, too. Empty: not such a service."""
    max_rank: int
    """Largest rank of an adapter."""
    adapters_in_memory: int
    """Adapters, with their optimisers, that the trainer has in memory at the same time; those that were not used for the longest time are written down, and come back with their next operation."""
    adapters_mb: int
    """Megabytes that these may have: weights, gradients and two moments of each."""
    idle_s: float
    """Seconds after which an adapter that nobody uses is written down in any case."""
    sampled_at_once: int
    """Adapters that one sampler holds, and decodes with in one batch; further ones wait until one is idle."""
    checkpoint_mb: int
    """Megabytes of checkpoints that one user may have; saving fails beyond."""
    history_mb: int
    """Megabytes of operations that are kept in the run's folder once they have taken effect, so that `tinkermq replay` can do a session again; those of the models that rest longest go first. 0: none are kept."""
    micro_batch_tokens: int
    """Tokens that are computed at once, of one model."""
    mixed_micro_batches: bool
    """Let micro-batches of several models be computed in one pass where they fit: faster for many small ones. The last bits of a result then depend on which those were; that is kept with the result, so that operations done again after a crash, and replays, come to the same bits."""

class TrainingConfigDict(TypedDict, total=False):
    num_steps: int | None
    """Optimiser steps; wins over `num_epochs`."""
    num_epochs: int | None
    """Passes over the training data; without either, one."""
    batch_size: int
    """Tasks per step."""
    max_staleness: int | Literal['auto']
    """Nothing with a larger lag is trained (see `staleness_policy`); 0 is on-policy; auto: as far ahead as measured times ask for, from 1 to `staleness_limit`."""
    staleness_limit: int
    """Largest bound that auto may choose: no group with a larger lag is trained."""
    staleness_policy: Literal['drop', 'wait', 'train', 'mask']
    """A group over the bound: dropped and issued again, waited for beforehand, or trained; with mask without its tokens over the bound, which stay as context, while its episodes count in baselines as they are: for episodes that take longer than many steps."""
    curriculum: Literal['none', 'success_rate']
    """Which task comes next: each once an epoch in a shuffled order, or by success rate, those that are solved about half of the time most often."""
    curriculum_uniform: float
    """Share of the tasks that are chosen whatever their success rate."""
    own_curriculum: str | None
    """A function of one's own that weighs the tasks, from how often each was tried and solved ([own algorithms](own-algorithms.md))."""
    curriculum_tasks: int | None
    """Seeds that are chosen from, of a game that generates its states."""
    tasks: Literal['data', 'external']
    """Tasks come from the data, or only from clients that publish tasks or trajectories."""
    test_freq: int
    """Validate every so many steps; 0: only before and after."""
    validate_before_training: bool
    """Validate the initial weights."""
    save_freq: int
    """Checkpoint every so many steps, and at the end; 0: when `save_minutes` ask for one."""
    save_minutes: float
    """Checkpoint, too, when the last is so old: a learner that dies trains no more than that again. Rarer where writing one takes over a tenth of that time; 0: never."""
    keep_last: int
    """Newest checkpoints that are kept. The rollout log is kept from the one before the newest on, which is gone on from when the newest is damaged, unless it fills three quarters of `limits.rollout_bytes`; with 1 there is none to go back to."""
    keep_every: int
    """Checkpoints of every so many steps are kept for good; 0: none."""
    keep_best: bool
    """Write a checkpoint at each step that is validated, and keep the one with the best mean score until a better one is there: `RUN@best`, and the link `best` in the run folder."""
    keep_rollouts: bool
    """Never trim the rollout log: the run can be replayed, and all of it looked at. Else the newest groups are left when it ends."""
    kept_rollout_bytes: int
    """Bytes of rollouts that are kept in the run's folder, where they outlive the log, for people to look at: at its end the newest, for half of the bytes, and some of each checkpoint's steps, sampled more thinly the longer the run is; 0: none."""
    plateau_steps: int
    """Who has asked for notifications is told when validation, or else the reward, has not improved for so many steps; 0: never."""

class EvaluationConfigDict(TypedDict, total=False):
    samples: int
    """Episodes per validation task; over 1 gives pass@k."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_p: float
    """Nucleus sampling."""
    success_reward: float
    """A return above this is a success, unless the game tells it in `info["success"]`."""
    data: Literal['val', 'train']
    """What is evaluated: the validation set, or the rows of `env.train_data` in their own order."""
    reset_kwargs: dict[str, Any]
    """Further arguments of the game's `reset` in validation, such as another opponent."""
    tasks: list[int] | None
    """A fixed list of rows, or of seeds of a game that generates its states; default: all."""

class SelfPlayConfigDict(TypedDict, total=False):
    past_share: float
    """Share of the tasks in which one role learns and an earlier version plays the others; in the rest all roles are played by the present version, and learn."""
    pool_every: int
    """Versions of every so many steps are kept as opponents, the first one included."""
    pool_size: int
    """The newest so many of them are played against."""
    redraw_every: int
    """Versions after which a generator draws another opponent from the pool."""

class WeightsConfigDict(TypedDict, total=False):
    transport: Literal['object', 'file', 'nccl']
    """Through NATS; through a folder that learner and generators share; or from the learner's memory by torch.distributed, which speaks NCCL between GPUs and gloo otherwise."""
    folder: str | None
    """The shared folder; default: the run folder."""
    chunk_bytes: int
    """Size of one message."""
    differences: bool
    """Send 16-bit weights (`learner.publish_dtype: bfloat16`) as differences from earlier versions where that is less; learner, generators and evaluators then keep two versions in memory."""
    whole_every: int
    """Of so many versions one is stored whole, too, for those who join or were away."""
    stock_digest: bool
    """Also compute the SHA-256 without which `nats object get` refuses what is published: on a processor without instructions for it that takes longer than sending."""
    shared_bytes: int
    """Room in each machine's shared memory (/dev/shm), where the first of the job's actors puts a version and the others find it: never more than half of what is free. 0: each reads for itself."""

class StorageConfigDict(TypedDict, total=False):
    url: str | None
    """Checkpoints are kept below this URL, too (`s3://bucket/prefix`, `gs://`, `file:///folder`): a learner on a machine that has none of the run's files goes on from there. Machines need the `storage` extra, and the store's credentials in their environment. `broker:` needs neither: the broker keeps them, up to `limits.checkpoint_bytes`."""

class LimitsConfigDict(TypedDict, total=False):
    task_bytes: int
    """Task queue."""
    rollout_bytes: int
    """Rollout log; a full log makes generators wait."""
    segment_bytes: int
    """Running episodes, with `generator.segment_tokens` or programs; what does not fit is not written down."""
    operation_bytes: int
    """Operations of programs that use the Tinker API, and their results, each; results are kept for a day, the oldest go first."""
    checkpoint_bytes: int
    """Checkpoints in the broker (`storage.url: "broker:"`): room for `training.keep_last` + 2, one more with `training.keep_best`."""
    log_bytes: int
    """Log lines of the actors, metrics and events, and traces, each; the oldest go first."""
    max_restarts: int
    """An actor that fails more often within ten minutes fails the job; so does one that fails more often in a row, over any time, without having done any work in between: a step, a group, an evaluation, an answer."""
    max_losses: int
    """A job that loses its node more often is not queued again but fails."""
    untrainable_groups: int | None
    """So many groups in a row that could not be trained (all returns equal, filtered, stale, malformed) end the run with a checkpoint; default: 20 batches, but at least 256; 0: never."""
    idle_s: float
    """A run of which no task was finished for so long, in seconds, ends with a checkpoint: it gives its slots back when whoever hosts its game has gone for good."""

class JobConfigDict(TypedDict, total=False):
    name: str | None
    """Name of the run; default `<env>-<model>-<two words>`."""
    tags: list[str]
    """What the run is found by in lists; `tinkermq label` changes them later."""
    group: str | None
    """Runs that belong together have the same: those of one sweep, the seeds of one setting."""
    notes: str
    """What is to be remembered of the run, for people."""
    seed: int
    """Seed of data order, episodes and optimiser."""
    output_dir: str
    """Run folders are made here, on the pool."""
    logger_backends: list[Literal['console', 'jsonl', 'tensorboard', 'wandb', 'wandb-offline', 'trackio', 'mlflow']]
    """Where metrics go besides the broker; jsonl always."""
    project: str
    """Project name at the experiment tracker."""
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
    """Roles with a policy of their own, and its model; `model` plays all the others."""
    self_play: SelfPlayConfigDict
    weights: WeightsConfigDict
    storage: StorageConfigDict
    limits: LimitsConfigDict
