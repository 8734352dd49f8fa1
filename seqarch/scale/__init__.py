"""Models at several sizes: do small ones predict the order of larger ones, and what does a mixer save?"""
