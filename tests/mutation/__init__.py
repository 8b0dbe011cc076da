"""Mutation testing of the reference kernels: does the suite notice when a kernel is broken?"""
