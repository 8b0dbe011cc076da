# ruff: noqa: E501
"""Survivors of the mutation run that no input can tell from the original, each with the reason."""

_BY_REASON: dict[str, list[str]] = {
    ("What is not chosen was cleaned to 0 before: there the error, its square and the clipped term are all 0."): [
        "value_loss:macro_value_loss:dropped term:units.chosen & (clipped > loss) -> clipped > loss#1",
        "value_loss:macro_value_loss:mask:torch.where(units.chosen, loss * 0.5, 0) -> loss * 0.5#1",
        "value_loss:macro_value_loss:mask:torch.where(units.chosen, slope, 0) -> slope#1",
    ],
    "One more slot at the end: every token's slot is among the first N + 1.": [
        "value_loss:macro_value_loss:off by one:torch.nn.functional.pad(slope, (0, 1)) -> torch.nn.functional.pad(slope, (0, 2))#1",
        "policy_loss:macro_policy_loss:off by one:torch.nn.functional.pad(slope, (0, 1)) -> torch.nn.functional.pad(slope, (0, 2))#1",
        "advantages:_gae:off by one:1 -> 2#1",
        "segmentation:perplexity:off by one:torch.nn.functional.pad(opens.cumsum(1).reshape(-1), (0, 1)) -> torch.nn.functional.pad(opens.cumsum(1).reshape(-1), (0, 2))#1",
        "_layout:Sequences.__init__:off by one:torch.nn.functional.pad(self.offsets, (0, 1), value=self.num_tokens) -> torch.nn.functional.pad(self.offsets, (0, 2), value=self.num_tokens)#1",
        "_layout:Macros.rank:off by one:self.lengths[:-1] -> self.lengths[:]#1",
        "_layout:Macros.rank:off by one:torch.nn.functional.pad(self.lengths[:-1].cumsum(0), (1, 0)) -> torch.nn.functional.pad(self.lengths[:-1].cumsum(0), (1, 1))#1",
    ],
    "The result is masked once more at the end, and no entry enters another one's.": [
        "whiten:masked_normalize:mask:torch.where(mask, x.to(moments.dtype), 0) -> x.to(moments.dtype)#1",
        "whiten:masked_normalize:off by one:torch.where(mask, x.to(moments.dtype), 0) -> torch.where(mask, x.to(moments.dtype), 1)#1",
    ],
    (
        "The keys of a row have to lie above those of the row before it, whose bounds are at most "
        "num_tokens: any span from num_tokens on does that (an equal key counts as before it, as "
        "right=True says)."
    ): [
        "segmentation:from_bounds:dropped term:tokens.num_tokens + 1 -> tokens.num_tokens#1",
        "segmentation:from_bounds:off by one:tokens.num_tokens + 1 -> tokens.num_tokens + 2#1",
        "segmentation:from_bounds:off by one:tokens.num_tokens + 1 -> tokens.num_tokens + 0#1",
    ],
    (
        "The place of a token that is not chosen is that of the next chosen one, which comes later and is "
        "written over it (on a CPU, where equal places are written in order); what it reads back is "
        "masked."
    ): [
        "segmentation:perplexity:mask:torch.where(tokens.chosen, tokens.row * width + tokens.rank, tokens.num_rows * width) -> tokens.row * width + tokens.rank#1",
    ],
    ("Any width that holds the chosen tokens of every sequence gives the same ids; the padded width does."): [
        "segmentation:Tokens.widest:off by one:int(self.per_row(self.before).max()) if self.num_rows else 0 -> int(self.per_row(self.before).max()) if self.num_rows else 1#1",
    ],
    (
        "Read where the tensors lie on no CPU alone, where a fake tensor shows that nothing waits but not "
        "what the numbers are: a matter of the tests with a GPU."
    ): [
        "segmentation:Tokens.widest:off by one:self.shape[1] -> self.shape[0]#1",
        "_layout:Sequences.__init__:bound:cu_seqlens.long().clamp(0, self.num_tokens) -> cu_seqlens.long()#1",
        "_layout:Macros.__init__:bound:torch.where(self.action, self.start + ids, self.spill).clamp(max=self.spill) -> torch.where(self.action, self.start + ids, self.spill)#1",
        "_layout:Macros.sum:condition:total.index_put_((self.slot,), x, accumulate=True) -> total.index_put_((self.slot,), x, accumulate=False)#1",
        "macro:_broadcast:dropped term:macros.action & (macros.ids < num_macros) -> macros.action#1",
        "macro:_broadcast:comparison:macros.ids < num_macros -> macros.ids <= num_macros#1",
        "advantages:_discounted_suffix_sums:operator:delta.shape[0] - 1 -> delta.shape[0] + 1#1",
        "advantages:_discounted_suffix_sums:dropped term:delta.shape[0] - 1 -> delta.shape[0]#1",
        "advantages:_discounted_suffix_sums:off by one:delta.shape[0] - 1 -> delta.shape[0] - 2#1",
        "advantages:_discounted_suffix_sums:off by one:delta.shape[0] - 1 -> delta.shape[0] - 0#1",
    ],
    "The weights are divided by their sum afterwards, and a factor of 2 is exact.": [
        "macro:token_weights:off by one:1 / (macros.to_tokens(macros.lengths) - rank).to(dtype) -> 2 / (macros.to_tokens(macros.lengths) - rank).to(dtype)#1",
        "macro:token_weights:off by one:1 / (rank + 1).to(dtype) -> 2 / (rank + 1).to(dtype)#1",
    ],
    (
        "The weight of a token that is no action meets a value or a gradient of 0, and the slot that it "
        "adds to is set to 0."
    ): [
        "macro:token_weights:off by one:torch.where(macros.action, weight, 0) -> torch.where(macros.action, weight, 1)#1",
        "macro:token_weights:off by one:torch.where(macros.action, weight / macros.to_tokens(macros.sum(weight)), 0) -> torch.where(macros.action, weight / macros.to_tokens(macros.sum(weight)), 1)#1",
    ],
    ("A token that is no action has id -1: it reads the number before its own, or the last one, and is masked."): [
        "macro:_broadcast:mask:torch.where(inside, macros.row * num_macros + macros.ids, 0) -> macros.row * num_macros + macros.ids#1",
    ],
    "The first entry alone is taken.": [
        "_layout:scalar:off by one:torch.ones(1, dtype=dtype, device=device) -> torch.ones(2, dtype=dtype, device=device)#1",
    ],
    "With a width of 0 there is no token whose row the division would give.": [
        "_layout:Sequences.__init__:off by one:max(width, 1) -> max(width, 0)#1",
    ],
    "A token that is no action has the last slot anyway, which is set to 0.": [
        "_layout:Macros.first:dropped term:self.action & (self.rank == 0) -> self.rank == 0#1",
    ],
    (
        "A token that is no action is masked where this is used: its reward becomes 0, and the length in its slot is 0."
    ): [
        "_layout:Macros.last_of_row:dropped term:self.action & (self.num_before[1:] == self.num_before[self.end]) -> self.num_before[1:] == self.num_before[self.end]#1",
    ],
    "On a CPU both ways add in order.": [
        "_layout:Macros.sum:condition:if x.is_cuda -> if not x.is_cuda#1",
    ],
    "The last entry is cut off, or read for tokens that are no action alone, and masked.": [
        "_layout:Macros.sum:off by one:0 -> 1#1",
        "_layout:Macros.at_first:off by one:0 -> 1#1",
    ],
    "-0 is what this makes 0, and they are equal: the KL there is 0 already.": [
        "advantages:_rewards:mask:torch.where(macros.action, rewards, 0) -> rewards#1",
    ],
    (
        "A macro action reads as far as its `following`, and so never a slot without one; what stands in "
        "those is given to no token."
    ): [
        "advantages:_gae:mask:torch.where(macros.exists, following, -1) -> following#1",
        "advantages:_gae:off by one:torch.where(macros.exists, following, -1) -> torch.where(macros.exists, following, -2)#1",
        "advantages:_gae:off by one:torch.where(macros.exists, following, -1) -> torch.where(macros.exists, following, -0)#1",
        "advantages:_gae:mask:torch.where(macros.exists, reward + g * next_value - value, 0) -> reward + g * next_value - value#1",
        "advantages:_gae:off by one:torch.where(macros.exists, reward + g * next_value - value, 0) -> torch.where(macros.exists, reward + g * next_value - value, 1)#1",
    ],
    "Where one stride is out of reach all larger ones are: that product is never used.": [
        "advantages:_discounted_suffix_sums:mask:torch.where(reaches, decay[:-stride] * decay[stride:], decay[:-stride]) -> decay[:-stride] * decay[stride:]#1",
    ],
    "What is no action is masked again wherever this is used, or adds to the slot that is set to 0.": [
        "policy_loss:macro_policy_loss:mask:torch.where(macros.action, macros.flat(logprobs).to(dtype) - macros.flat(old_logprobs).to(dtype), 0) -> macros.flat(logprobs).to(dtype) - macros.flat(old_logprobs).to(dtype)#1",
        "policy_loss:macro_policy_loss:off by one:torch.where(macros.action, macros.flat(logprobs).to(dtype) - macros.flat(old_logprobs).to(dtype), 0) -> torch.where(macros.action, macros.flat(logprobs).to(dtype) - macros.flat(old_logprobs).to(dtype), 1)#1",
    ],
    (
        "The length is below 1 in slots without a macro action alone; their loss and slope are masked, "
        "and given to no token."
    ): [
        "policy_loss:macro_policy_loss:bound:macros.lengths[:-1].clamp(min=1) -> macros.lengths[:-1]#1",
        "policy_loss:macro_policy_loss:off by one:macros.lengths[:-1].clamp(min=1) -> macros.lengths[:-1].clamp(min=0)#1",
        "policy_loss:macro_policy_loss:bound:macros.lengths[:-1].clamp(min=1) -> macros.lengths[:-1]#2",
        "policy_loss:macro_policy_loss:off by one:macros.lengths[:-1].clamp(min=1) -> macros.lengths[:-1].clamp(min=0)#2",
    ],
    "With advantage 0, which what is not chosen has too, every term is 0: the ratio is finite.": [
        "policy_loss:macro_policy_loss:comparison:advantage < 0 -> advantage <= 0#1",
        "policy_loss:macro_policy_loss:dropped term:units.chosen & (advantage != 0) -> units.chosen#1",
        "policy_loss:macro_policy_loss:mask:units.chosen & (advantage != 0) -> units.chosen | (advantage != 0)#1",
        "policy_loss:macro_policy_loss:dropped term:units.chosen & (advantage != 0) -> advantage != 0#1",
        "policy_loss:macro_policy_loss:mask:torch.where(counts, loss, 0) -> loss#1",
        "policy_loss:macro_policy_loss:dropped term:counts & ~is_flat -> ~is_flat#1",
        "policy_loss:macro_policy_loss:dropped term:is_clipped & units.chosen -> is_clipped#1",
    ],
    "The KL penalty is the first that is added, to 0.": [
        "policy_loss:policy_penalty:dropped term:total + (difference * slope).sum() / 2 -> (difference * slope).sum() / 2#1",
    ],
    "The number of tokens is the same whatever the units are.": [
        "policy_loss:policy_penalty:condition:Units(macros, of_macros=False) -> Units(macros, of_macros=True)#1",
    ],
    "Any negative label ignores its row.": [
        "policy_loss:action_labels:off by one:torch.where(macros.action, macros.flat(labels), -1) -> torch.where(macros.action, macros.flat(labels), -2)#1",
    ],
    "A negative label has a negative column.": [
        "logprobs:RowBlock.__init__:dropped term:self.valid & (column >= 0) -> column >= 0#1",
    ],
    "A division by 1 changes nothing.": [
        "logprobs:RowBlock.__init__:comparison:temperature.device.type == 'cpu' -> temperature.device.type != 'cpu'#1",
        "logprobs:RowBlock.__init__:off by one:float(temperature) == 1 -> float(temperature) == 0#1",
    ],
    "All rows are valid where this holds; where it does not, masking them changes no valid row.": [
        "logprobs:_gradient_into:comparison:labels.device.type == 'cpu' -> labels.device.type != 'cpu'#1",
        "logprobs:_gradient_into:comparison:labels >= 0 -> labels > 0#1",
        "logprobs:_gradient_into:off by one:labels >= 0 -> labels >= 1#1",
    ],
    "Only how many rows are taken at a time changes; at least one is.": [
        "logprobs:_blocks:off by one:logits.shape[-1] -> logits.shape[-0]#1",
        "logprobs:_blocks:off by one:max(1, limit // max(vocabulary, 1)) -> max(2, limit // max(vocabulary, 1))#1",
        "logprobs:_blocks:operator:limit // max(vocabulary, 1) -> limit * max(vocabulary, 1)#1",
        "logprobs:_blocks:dropped term:limit // max(vocabulary, 1) -> limit#1",
        "logprobs:_blocks:bound:max(vocabulary, 1) -> min(vocabulary, 1)#1",
        "logprobs:_blocks:off by one:max(vocabulary, 1) -> max(vocabulary, 2)#1",
        "logprobs:_blocks:off by one:max(vocabulary, 1) -> max(vocabulary, 0)#1",
        "linear:_Head.__init__:off by one:max(1, budget // max(weight.shape[0], 1)) -> max(2, budget // max(weight.shape[0], 1))#1",
        "linear:_Head.__init__:operator:budget // max(weight.shape[0], 1) -> budget * max(weight.shape[0], 1)#1",
        "linear:_Head.__init__:dropped term:budget // max(weight.shape[0], 1) -> budget#1",
        "linear:_Head.__init__:bound:max(weight.shape[0], 1) -> min(weight.shape[0], 1)#1",
        "linear:_Head.__init__:off by one:max(weight.shape[0], 1) -> max(weight.shape[0], 2)#1",
        "linear:_Head.__init__:off by one:max(weight.shape[0], 1) -> max(weight.shape[0], 0)#1",
        "linear:_Head.__init__:off by one:weight.shape[0] -> weight.shape[1]#1",
    ],
    (
        "Two sizes of 1, or rows that lie on one another, where the numbers read are the same and writing them in place "
        "has no meaning."
    ): [
        "logprobs:_slabs:off by one:logits.stride(0) -> logits.stride(1)#1",
        "logprobs:_slabs:dropped term:logits.stride(1) * logits.shape[1] -> logits.stride(1)#1",
        "logprobs:_slabs:off by one:logits.stride(1) -> logits.stride(0)#1",
    ],
    "The slices of an ignored row are 0 in every number, and so is what is made of them here.": [
        "linear:merge_slices:mask:torch.where(valid, log_total - mean, 0) -> log_total - mean#1",
    ],
    ("The gradient of an ignored row's logits is 0, whatever finite hidden state it is multiplied with."): [
        "linear:_Head.chunks:off by one:torch.where(self.valid[where], self.hidden[where].to(self.dtype), 0) -> torch.where(self.valid[where], self.hidden[where].to(self.dtype), 1)#1",
    ],
    "d is 0 where there is no action, and e^0 - 1 - 0 is 0.": [
        "policy_loss:macro_policy_loss:mask:torch.where(macros.action, torch.expm1(d) - d, 0) -> torch.expm1(d) - d#1",
    ],
    (
        "What stands where there is no action goes to the slot of no macro action, which is emptied, or is masked again "
        "where it is used; the entropy of such a token, which is not, comes from an op that makes it 0."
    ): [
        "_layout:Macros.clean:mask:torch.where(self.action, self.flat(x).to(dtype), 0) -> self.flat(x).to(dtype)#1",
        "_layout:Macros.clean:off by one:torch.where(self.action, self.flat(x).to(dtype), 0) -> torch.where(self.action, self.flat(x).to(dtype), 1)#1",
    ],
}

EQUIVALENT = {key: reason for reason, keys in _BY_REASON.items() for key in keys}
