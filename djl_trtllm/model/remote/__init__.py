"""Models that are elsewhere: on the Hugging Face hub or in S3, brought to a local directory before they are read.

A download is complete or is not there: files arrive in a folder of their own, are checked against the checksums the
other side gives, and get their final name when all of them are. What is there and unchanged is not fetched again.
"""
