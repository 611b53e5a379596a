"""draft"""
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from contextlib import nullcontext
import functools

import numpy as np
import pytest
import torch
from record_examples import make_document
from recorded_collectives import Recording, find_faults, record
from tiny_families import make_config

from memguard.audit.decoding import Decoder
from memguard.audit.extraction import Window
from memguard.audit.probes.extraction import ExtractionProbe
from memguard.audit.requests import Prompt
from memguard.config import OptimConfig, ParallelConfig, TrainConfig
from memguard.config.settings import SamplingScheme
from memguard.data.loader import Batch
from memguard.hf import export
from memguard.hf.assembly import Assembly, build_meta_layer, fill_layer
from memguard.hf.load import ModuleWeights, build_scratch_model
from memguard.mitigation import build_mitigations
from memguard.parallel.model_sizes import ModelSizes
from memguard.train.heldout import measure_heldout
from memguard.train.step import TrainStep
from memguard.workflows.audit_callback import ModelInTraining, take_snapshot
from memguard.workflows.setup import open_distributed
import transformers

SIZES={"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
T={}
class tm:
    def __init__(s,n): s.n=n
    def __enter__(s): s.t=time.process_time()
    def __exit__(s,*a): T[s.n]=T.get(s.n,0)+time.process_time()-s.t

@functools.cache
def model():
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(make_config("llama", **SIZES)).eval()

def stand_in(value):
    if isinstance(value, torch.Tensor):
        return value.zero_() if value.is_floating_point() else value
    if isinstance(value, dict) and value and all(isinstance(k,int) for k in value):
        return {i: next(iter(value.values())) for i in range(100)} | value
    return value

def run_rank(degrees, rank, after, folder):
    data,z,y,x=degrees
    n=data*z*y*x
    ways=data*z
    cfg=model().config
    train=TrainConfig(batch_size=2*ways, micro_batch_size=1, precision="fp32", activation_checkpointing="full", compile=False)
    with record(n, rank, after=after, stand_in=stand_in) as rec:
        rec.stage="setup"
        with tm("setup"):
            ctx=open_distributed(ParallelConfig(data=data,z=z,y=y,x=x), ModelSizes.from_config(cfg), batch_size=2*ways)
        with ctx as d:
            with tm("setup"):
                d.mesh.connect(d.runtime.device)
            rt=d.runtime
            with tm("build"):
                assembly=Assembly.for_training(train, mesh=d.mesh, device=rt.device)
                layer=build_meta_layer(cfg, assembly)
            with tm("fill"):
                fill_layer(layer, ModuleWeights(model()), name="m")
            lm=layer.lm
            rec.stage="step"
            with tm("step"):
                step=TrainStep(lm=lm, mitigations=build_mitigations((), special_ids=[]), train=train, optim=OptimConfig(), seed=0, runtime=rt)
                ids=np.ones((2,8),dtype=np.int64)
                lm.model.train()
                step.run(Batch(input_ids=ids, labels=ids, position_ids=np.tile(np.arange(8),(2,1)), document_ids=np.zeros((2,8),dtype=np.int64), num_supervised=14,num_kept=14), lr=1e-3, step=1, first_sample=0)
            rec.stage="heldout"
            docs=[make_document(np.arange(10)+i) for i in range(max(ways-1,1))]
            corpus=SimpleNamespace(manifest=[SimpleNamespace(role="heldout",bucket="h")]*len(docs), document=lambda i: docs[i])
            with tm("heldout"):
                measure_heldout(lm, corpus, seq_len=16,batch_tokens=10, step=1, runtime=rt, precision=step.precision)
            rec.stage="budget"
            windows=[Window(document=dd,start=0,prefix_tokens=7,continuation_tokens=3) for dd in docs]
            m=ModelInTraining(lm=lm,batch_tokens=10,runtime=rt)
            with tm("budget"):
                snap=take_snapshot(m, windows, ExtractionProbe(generation_floor=0), seed=0, needs_near_verbatim=True)
            rec.stage="decode"
            with tm("decode"):
                dec=Decoder(lm, 10, rt)
                dec.sample([Prompt.of(w,1) for w in windows], SamplingScheme(top_k=5,temperature=1.0), 1, 0)
            rec.stage="export"
            with tm("export"):
                export.export_sharded(layer, SimpleNamespace(save_pretrained=lambda f: None), folder/"out", dtype=torch.bfloat16, card="", max_file_bytes=20000)
    return rec

def test_x(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "commit", lambda a,b: None)
    for deg in [(1,1,1,4),(1,2,2,2)]:
        recs=[]
        for r in range(np.prod(deg)):
            t=time.process_time()
            recs.append(run_rank(deg, r, recs, tmp_path))
            print(r, time.process_time()-t, len(recs[-1].calls))
        t=time.process_time()
        for f in find_faults(recs): print(f)
        print("check", time.process_time()-t)
    from collections import Counter
    print(Counter((c.stage,c.operation,c.group.description) for c in recs[0].calls))
    print(T)
