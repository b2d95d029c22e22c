"""Feed-forward blocks: what a layer does to each token for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localkv.arch.norm_spec import NormSpec

Activation = Literal["silu", "gelu", "relu", "relu2", "xielu", "swiglu_oai"]
"""GELU is its tanh form (Hendrycks & Gimpel 2016); "relu2" is relu(x)^2 (So et al. 2021); "xielu"
is that of Huang & Schlag 2024, whose parameters are the layer's; "swiglu_oai" is gpt-oss's clamped
x sigmoid(1.702 x) (up + 1), which exists only gated."""

Gating = Literal["softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus"]
"""How the router's logits become the experts' shares; see `MoeSpec.gating`."""


@dataclass(frozen=True)
class XieluParams:
    """expanded integral of ELU (Huang & Schlag 2024, arXiv:2411.13010), with
    alpha_p = softplus(`alpha_p`) and alpha_n = beta + softplus(`alpha_n`):

    alpha_p x^2 + beta x for x > 0, else alpha_n (expm1(min(x, eps)) - x) + beta x.
    """

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


@dataclass(frozen=True)
class MlpSpec:
    """A feed-forward block: down(activation(gate(x)) * up(x)), `n_ff` wide.

    Attributes:
        gated: there is a gate; else down(activation(up(x))).
        xielu: parameters of that activation, None with others.
        sparsity: the gate's values are diminished by their mean and this many standard deviations
            per token, and those that are negative then become 0, before the activation (Gemma 3n);
            0 leaves them.
    """

    n_ff: int
    activation: Activation = "silu"
    gated: bool = True
    xielu: XieluParams | None = None
    sparsity: float = 0.0


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts (llama.cpp's `build_moe_ffn`).

    Attributes:
        n_experts, n_experts_used: how many there are, and how many each token is sent to.
        n_ff: hidden width of one expert.
        n_ff_shared: hidden width of the shared expert, 0 if there is none.
        renormalise: the selected experts' weights are divided by their sum.
        gating: what makes shares of the router's logits: the "softmax" over all experts, the
            "sigmoid" of each, the "softmax_of_chosen" experts, which are chosen by their logits, or
            the "sqrt_softplus" of each.
        selection_bias: `exp_probs_b.bias` is added to the shares for the choice only.
        n_groups, n_groups_used: experts are chosen from the best groups, each rated by the sum of
            its two best experts; 1 is no groups.
        weights_scale: factor on the weights.
        shared_scale: factor on the shared expert's output.
        shared_gated: the shared expert's output is multiplied by a sigmoid of the token.
        activation: of the experts, and of the shared one.
        gated: experts have a gate, as the shared one.
        biased: router and experts must have biases; elsewhere a file may have them.
        router_reads_input: the router reads the layer's input, before any norm (SmallThinker).
        weighs_input: an expert's weight multiplies what it reads, not what it gives (Llama 4).
        router_norm: of what the router reads, by weights `<tensor>.scale` / sqrt(n_embd), or None
            (Gemma 4).
    """

    n_experts: int
    n_experts_used: int
    n_ff: int
    n_ff_shared: int = 0
    renormalise: bool = True
    gating: Gating = "softmax"
    selection_bias: bool = False
    n_groups: int = 1
    n_groups_used: int = 1
    weights_scale: float = 1.0
    shared_scale: float = 1.0
    shared_gated: bool = False
    activation: Activation = "silu"
    gated: bool = True
    biased: bool = False
    router_reads_input: bool = False
    weighs_input: bool = False
    router_norm: NormSpec | None = None

    @property
    def expert(self) -> MlpSpec:
        """The block that each expert is."""
        return MlpSpec(self.n_ff, self.activation, self.gated)

    @property
    def shared(self) -> MlpSpec:
        """The block that the shared expert is."""
        return MlpSpec(self.n_ff_shared, self.activation, self.gated)


@dataclass(frozen=True)
class MlpAndMoeSpec:
    """A dense block and routed experts side by side (Gemma 4).

    Attributes:
        mlp, moe: both read the block's input.
        post_mlp_norm, post_moe_norm: of what each gives, before they are added.
        moe_norm: of what the experts read, which is not the layer's `ffn_norm`.
    """

    mlp: MlpSpec
    moe: MoeSpec
    post_mlp_norm: NormSpec
    post_moe_norm: NormSpec
    moe_norm: NormSpec


Ffn = MlpSpec | MoeSpec | MlpAndMoeSpec
