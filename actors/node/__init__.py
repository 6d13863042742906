"""The node: announces its slots, starts and watches the actors of jobs, captures their logs.

`node` answers the scheduler; `process` keeps one actor alive and takes what it writes, `children`
and `sandbox` say how it is started, `fork_server` forks it.
"""
