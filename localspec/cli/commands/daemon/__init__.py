"""The commands about the daemon itself, each in the file of its name.

start, stop, status, logs  what it does and says
token                      what TCP clients need
unload                     give loaded pairs' memory back
service                    let the system start it
rpc_worker                 hold layers for another machine
doctor                     what keeps it from working well
"""
