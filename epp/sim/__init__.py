"""The emulated vLLM worker: one engine model, two drivers (virtual time and real time).

    Sequence -> EngineCore.add_request        what is to be computed
                 Scheduler.schedule           which tokens in this step; admission, chunks, preemption
                 KVCacheManager, BlockPool    which blocks hold them; prefix cache, eviction, events
                 CostModel.seconds            how long the step takes
             <- EngineCore.end_step           a token for each sequence that is due one

`virtual` drives it with an event queue, `async_engine` with the clock, behind `server` (HTTP) and `publisher` (ZeroMQ).
"""
