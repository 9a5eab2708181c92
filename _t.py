import sys,tempfile,torch,time
from pathlib import Path
from verify.profile.skeleton import skeleton
from verify.profile.layers import layer_kinds, with_layers
from verify.profile.job import *
from verify.profile.rank import run_job
from reshard.planning.plan import plan_of
from reshard.planning.totals import all_reduces
from formats.mesh import mesh_of
from verify.forward.launch import run_ranks, start_fork_server
if __name__=="__main__":
    from tests import zoo
    start_fork_server("verify.profile.rank")
    for n in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as d:
            e=zoo.ZOO[n]
            with torch.device("meta"): m=e.build()
            m.config.architectures=[type(m).__name__]
            m.config.save_pretrained(d)
            try:
                model=skeleton(Path(d),"bfloat16")
                kinds=layer_kinds(model)
                full=plan_of(model,mesh_of(int(sys.argv[1])))
                plan=with_layers(full,kinds)
                job=Job(plan,kinds,True,(Workload("prefill",2,16),Workload("decode",2,16),Workload("train",2,16)),"bfloat16","cpu",1,Patience(0.2))
                f=run_ranks(run_job,int(sys.argv[1]),job,progress=lambda t:None)
            except Exception as ex:
                print(n,type(ex).__name__,str(ex)[:300]); 
                if '-v' in sys.argv: print(getattr(ex,'details',''))
                continue
            fw,bw=all_reduces(full)
            print(n,kinds,fw,bw)
            for w,mm in zip(job.workloads,f[0].measured):
                by={}
                for s in mm.steps[0]:
                    if s.what=="all-reduce": by.setdefault(s.part,[]).append(s.nbytes//w.tokens)
                counts={k.part:k.count for k in kinds}
                tot=sum(sum(v)*counts.get(p,1) for p,v in by.items())
                print("  ",w,len(mm.steps),f"{sum(s.seconds for s in mm.steps[0])*1e3:.2f}ms",by,"total",tot,"plan",fw.nbytes+(bw.nbytes if w.phase=="train" else 0),mm.cache,mm.activations,mm.saved)
