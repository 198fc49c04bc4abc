"""Speculative decoding: propose tokens cheaply, verify all in one pass of the target, keep its distribution.

config        what is asked for: methods, draft length, under vLLM's names
proposer      the protocol of whatever drafts; a chain of them
ngram         prompt lookup in the request's own text
suffix        a suffix automaton over the request's own text and, if asked for, over past outputs
draft_engine  a smaller engine with the same vocabulary
head_engine   an EAGLE-style head on the target's hidden states
verification  the target's logits against the drafts
length        how many tokens to draft: measured acceptance against measured step times
crowd         whether to draft where many sequences run: what it saved against what it may lose
speculator    all of it, for one engine core
"""
