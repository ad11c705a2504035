"""Small kernels for the tests of the audit: right ones, and one for each thing the audit must
notice.
"""
