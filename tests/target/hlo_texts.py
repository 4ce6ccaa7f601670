"""Small scheduled HLO modules, written by hand in the compilers' form, with figures that can be checked by head."""

# ruff: noqa: E501
MIB = 1 << 20

# 1 MiB each: argument a, temporaries b and c, output d. b dies where c is made (not element-wise: no reuse).
CHAIN = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[512,512]{1,0})->f32[512,512]{1,0}}

FileNames
1 "/models/model.py"
2 "/usr/lib/python3/site-packages/flax/nnx/nn/linear.py"

FunctionNames
1 "loss"
2 "Linear.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=90 end_line=90 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main.1 (a: f32[512,512]) -> f32[512,512] {
  %a = f32[512,512]{1,0} parameter(0), metadata={op_name="a"}
  %b = f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/jvp(~blocks/0~)/~blocks/0/attn~/dot_general" stack_frame_id=2}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %c = f32[512,512]{1,0} dot(%b, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/jvp()/dot_general"}, backend_config={"window_config":{"estimated_cycles":"20"}}
  ROOT %d = f32[512,512]{1,0} dot(%c, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/transpose(jvp())/dot_general"}, backend_config={"window_config":{"estimated_cycles":"3"}}
}
"""

# A loop of 5 trips whose body makes a temporary of 1 MiB.
LOOP = """HloModule jit_g, is_scheduled=true

%body (s: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %s = (s32[], f32[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[512,512]{1,0} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, backend_config={"window_config":{"estimated_cycles":"7"}}
  %z = f32[512,512]{1,0} dot(%y, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[512,512]{1,0}) tuple(%next, %z)
}

%condition (s.1: (s32[], f32[512,512])) -> pred[] {
  %s.1 = (s32[], f32[512,512]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %trips = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %trips), direction=LT
}

ENTRY %main.2 (a: f32[512,512]) -> f32[512,512] {
  %a = f32[512,512]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[512,512]{1,0}) tuple(%zero, %a)
  %loop = (s32[], f32[512,512]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[512,512]{1,0} get-tuple-element(%loop), index=1
}
"""

# A convolution and its two derivatives as library calls on GPU.
LIBRARY = """HloModule m, is_scheduled=true

ENTRY %e (x: f32[8,32,32,64], w: f32[3,3,64,128]) -> f32[8,16,16,128] {
  %x = f32[8,33,33,64]{3,2,1,0} parameter(0)
  %w = f32[128,3,3,64]{3,2,1,0} parameter(1)
  %y = (f32[8,16,16,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %g = f32[8,16,16,128]{3,2,1,0} get-tuple-element(%y), index=0
  %dw = (f32[128,3,3,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %g), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %dx = (f32[8,33,33,64]{3,2,1,0}, u8[0]{0}) custom-call(%g, %w), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  ROOT %out = (f32[8,16,16,128]{3,2,1,0}) tuple(%g)
}
"""
