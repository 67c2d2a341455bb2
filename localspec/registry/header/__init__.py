"""What a model's file says of it, before llama.cpp sees it.

source.py         where a header is read from
gguf.py           the header of a GGUF file
architectures.py  which architectures there are, and which can take tokens back
vocabulary.py     the tokens, and those that would end llama.cpp
weights.py        the tensors, and those that would end llama.cpp
model.py          the numbers of a model, and those that would end llama.cpp
traits.py         quantization, licence, chat template, abilities
pairing.py        may two models be a pair?
kept.py           what a model keeps of the texts it reads
need.py           memory a pair needs
fit.py            the context and the layers that fit
"""
