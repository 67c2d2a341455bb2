"""The queue before a pair's worker: which requests may run, and how long the others wait.

admission: the places, and the requests that wait for one
forecast: estimates of how long requests take, learned from earlier ones

This package knows requests and their progress, but no workers.
"""
