"""Download models from the Hugging Face hub or S3 to a local directory.

A download appears complete or not at all: files arrive in a folder of their own, are compared with the checksums of the
source, and the folder gets its final name last. Files that are present and unchanged are not downloaded again.
"""
