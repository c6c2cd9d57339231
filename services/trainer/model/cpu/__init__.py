"""Training fast on a CPU, through private operators of torch and options of glibc's malloc.

Every caller asks `device.type == "cpu"` first. On an accelerator the model's modules run as transformers built them.
"""
