"""The fields of model configs: their aliases, which look as if they shaped the cache, and which of those do not.

``Fields`` remembers what was read, so that a set field that may matter and that nobody read can be refused by name.

Knows nothing about what the fields mean (model_shape).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvbaton.types import LocalError

ALIASES = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": (
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_query_groups",
    ),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
}  # fmt: skip
# Model classes for which "no KV head count" means one per query head, and "no head_dim" means hidden / heads.
_MHA = """
llama gpt2 gptj gpt_neox gpt_neo opt bloom phi qwen mpt stablelm baichuan internlm codegen persimmon
"""
MHA_BY_DEFINITION = frozenset(_MHA.split())
# Their config classes default head_dim to a constant, so its absence is not hidden / heads.
_CONSTANT_HEAD_DIM = """
gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4_text qwen3 qwen3_moe qwen3_next gpt_oss
"""
HEAD_DIM_IS_CONSTANT = frozenset(_CONSTANT_HEAD_DIM.split())
# Every layer slides when the window is set and no per-layer list is given.
SLIDES_EVERYWHERE = frozenset(("mistral", "mixtral", "phi3", "phimoe", "starcoder2"))
# Names that look as if they shaped the cache and do not, or that other modules read.
_HARMLESS = """
add_cross_attention apply_layernorm_1p attention_bias attention_dropout attention_in_multiplier
attention_logit_cap attention_multiplier attention_out_bias attention_out_multiplier
attention_probs_dropout_prob attention_qkv_bias attention_softmax_in_fp32 attention_type attention_value_scale
attn_dropout attn_factor attn_implementation attn_logit_softcapping attn_module_list attn_pdrop attn_scale
attn_temperature_tuning block_auto_adjust_ff_dim block_dim block_ff_dim block_ffn_dim_multiplier
block_mlp_init_scale block_multiple_of block_norm_eps block_out_dim block_size block_use_swiglu
block_use_xavier_init cache_implementation chunk_size chunk_size_feed_forward conv_bias
cross_attention_hidden_size decoder_sparse_step do_layer_norm_before encoder_no_repeat_ngram_size
expert_layer_offset expert_layer_period first_k_dense_replace flash_attn_version full_attn_alpha_factor
full_attn_beta_factor head_bias hidden_size_per_layer_input index_n_heads index_topk initial_layer_norm
interleave_moe_layer_step is_encoder_decoder key_multiplier layer_idx layer_norm layer_norm_eps
layer_norm_epsilon layer_rope_theta layer_scale layerdrop layernorm_epsilon linear_a_log_max linear_a_log_min
linear_allow_neg_eigval linear_attn_alpha_factor linear_attn_beta_factor linear_dt_init_floor linear_dt_max
linear_dt_min lm_head_bias lm_head_multiplier mamba_chunk_size mamba_conv_bias mamba_dt_rank mamba_hidden_act
mamba_norm_before_gate mamba_proj_bias mamba_rms_norm max_window_layers mla_scale_kv_lora mla_scale_q_lora
mlp_layer_types mlp_only_layers moe_layer_end_index moe_layer_freq moe_layer_interval moe_layer_num
moe_layer_start_index moe_layers moe_num_shared_experts moe_shared_expert_intermediate_size
moe_shared_expert_overlap mtp_layers_block_type n_shared_experts no_rope_layer_interval no_rope_layers
num_experts_shared num_head_channels num_hidden_layers_pruned num_mtp_layers num_nextn_predict_layers
num_shared_experts original_max_position_embeddings output_attentions output_hidden_states
pad_head_dim_to_multiple_of pretraining_tp q_lora_rank qk_layernorm query_pre_attn_scalar
reorder_and_upcast_attn resid_pdrop residual_dropout rope_head_dim scale_attention_softmax_in_fp32
scale_attn_by_inverse_layer_idx scale_attn_weights share_embeddings share_expert_dim share_input_output_embed
shared_expert_combination_strategy shared_expert_intermediate_size shared_intermediate_size ssm_multipliers
state_dict swa_rope_theta tie_lm_head torchscript use_attention_gate use_bidirectional_attention use_cache
use_conv_bias use_flash_attn use_head_norm use_layernorm use_mamba_kernels use_mla use_qk_norm
use_sliding_window vocab_size_per_layer_input
"""
HARMLESS = frozenset(_HARMLESS.split())
SUSPECT = re.compile(
    r"(^|_)(kv|head|heads|attn|attention|window|cache|state|mamba|ssm|conv|latent|layer|layers|recurrent|lru|linear|"
    r"share|shared|cla|chunk|block|sparse|index|indexer|compress|sink|yoco|mla|swa)(_|$)|lora_rank|layernum"
)


class Fields:
    """One config section. Remembers what was read, so that what was not can be named."""

    def __init__(self, section: Mapping[str, Any], where: str) -> None:
        self._section = section
        self._where = where
        self.read: set[str] = set()
        self.notes: list[str] = []
        self._last: tuple[str, Any] = ("", None)

    def get(self, name: str, default: Any = None) -> Any:
        aliases = ALIASES.get(name, (name,))
        self.read.update(aliases)
        found = [(alias, self._section[alias]) for alias in aliases if self._section.get(alias) is not None]
        if any(value != found[0][1] for _, value in found):
            text = ", ".join(f"{alias} = {value!r}" for alias, value in found)
            raise LocalError(f"{self._where}: {text} contradict each other", field=f"{self._where}.{name}")
        if found:
            self._last = found[0]
        return found[0][1] if found else default

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise LocalError(
                f"{self._where} has no {name}", field=f"{self._where}.{name}", fix=f"add {name}; nothing is guessed"
            )
        return value

    def need_int(self, name: str) -> int:
        value = self.need(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(name, value, "a positive whole number is needed")
        return value

    def maybe_int(self, name: str) -> int | None:
        """A positive whole number, or None where there is none."""
        return None if self.get(name) is None else self.need_int(name)

    def bad(self, name: str, value: Any, fix: str) -> LocalError:
        text = repr(value)
        return LocalError(
            f"{self._where}.{name} = {text[:60]} is not understood", field=f"{self._where}.{name}", fix=fix
        )

    def count(self, name: str) -> int:
        """A whole number that may be left out, 0 then."""
        value = self.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.bad(name, value, "a whole number of 0 or more is needed")
        return value

    def nonsense(self) -> LocalError:
        """Something of the wrong kind was met: most likely what was read last."""
        return self.bad(*self._last, "it is of the wrong kind or size")

    def check_rest(self) -> None:
        """Refuse set fields that look as if they shaped the cache and that nobody read."""
        for name, value in self._section.items():
            inert = value is None or value is False or value in (0, [], {}, "")
            if inert or name in self.read or name in HARMLESS or not SUSPECT.search(name):
                continue
            raise self.bad(name, value, "this field may change the cache size; a model with it is not supported yet")
