"""The queue before a pair's worker: who may generate now, and how long the others wait.

admission: the places, and those who wait for one
forecast: how long requests take, by what those before them took

It knows requests by what they ask for, and no worker.
"""
