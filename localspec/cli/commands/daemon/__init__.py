"""The commands about the daemon, in files of the same names.

start, stop, restart, status, logs  control and watch the daemon
token                               the password of TCP clients
load, unload                        load a pair, or free its memory
service                             let the operating system start the daemon
rpc_worker                          hold layers for another machine
doctor                              check for problems
"""
