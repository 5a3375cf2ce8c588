"""TRL's GRPO trainer with a KL term whose expected gradient is ∇KL(π‖π_ref) of whole sequences (for trl 1.16.0).

    trainer = KLTrainer(model=..., reward_funcs=..., args=GRPOConfig(beta=0.04, top_p=1.0, top_k=0, ...), ...)

Everything else is GRPOTrainer's. No baseline: TRL shuffles the rows, so a prompt's completions are not adjacent. The
divergence is summed over tokens: β weighs a whole sequence, where TRL's own weighs about one token.
"""

from trl import GRPOTrainer

from klnb import kl_loss


class KLTrainer(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logp = out[0]  # in the loss: of the policy being trained, with its gradient
        return out

    def _compute_loss(self, model, inputs):
        beta, self.beta = self.beta, 0.0  # the trainer's own KL term is left out
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        rows = mask.any(1)  # rows that TRL masks out as a whole, such as cut completions, have no KL
        old = inputs.get("old_per_token_logps")  # there when rollouts are reused; else π itself sampled them
        old = None if old is None else old[rows]
        ref_logp = inputs["ref_per_token_logps"][rows]
        kl = kl_loss("reward-to-go", self._logp[rows], ref_logp, mask[rows], behavior_logp=old)
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        return loss + beta * kl * rows.float().mean() / steps
