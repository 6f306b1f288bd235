"""Point-to-point messages of one world. They take no part in negotiation rounds.

matching     which message goes to which receive
delivery     the endpoint, the lock, and the program's memory: what begins and what arrives
transfers    handles, and waiting: in the thread that calls, or in the background
"""
