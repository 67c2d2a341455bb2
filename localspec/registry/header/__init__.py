"""What the header of a model file states, before llama.cpp sees the file.

source.py         read ranges of a file, here or on the hub
gguf.py           parse the header of a GGUF file
architectures.py  the architectures of llama.cpp, and which of them can roll back tokens
vocabulary.py     the tokenizer, and checks against values that would end llama.cpp
weights.py        the tensors, and checks against values that would end llama.cpp
model.py          the numbers of a model, and checks against values that would end llama.cpp
traits.py         quantization, licence, chat template, abilities
pairing.py        decide whether two models may be a pair
kept.py           the size of a model's KV cache and recurrent state
need.py           the memory that a pair needs
fit.py            the context and the GPU layers that fit into memory
"""
