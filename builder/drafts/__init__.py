"""`plancast draft train`: a small draft for any model, by self-distillation with no data set.

config       what is asked for
corpus       the target writes answers, on its own engine at full batch
writer       dialogue by dialogue: who asks what, and where an answer ends
questions    everyday ones, put together of a list
repetition   where a text says again what it said before
train        steps and checkpoints, whatever is trained; held-out acceptance picks the best
make         all of it, from a recipe to a draft

A draft model:
student      some of the target's layers over its most frequent tokens
train_model  its distillation

A head:
head         a layer or few over the target's hidden states (EAGLE)
features     the target's hidden states over the corpus
train_head   its losses
make_head    from the corpus to the head's folder
head_file    that folder: int8 weights, shape, tokens, card
build_head   a build's stage: the head's engine in its target's artifact
"""
