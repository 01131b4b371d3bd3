--[[
gres-mig: a job's gate, the part of its constraint that lets it begin only on nodes that say they have a place for it.

job_submit.lua runs this where gres-mig-sizes.conf says that nodes have gates (`admission gates`). Such a node has two
features for each size: `migmem-9856` is active while it has a place for 9,856 MiB that is kept for nobody, and
`migmem-9856-try` while it wants to see a batch job of that size without that. A job's gate is of all sizes that hold
what it asks for, on whatever type of node, and comes last in its constraint. AdminComment says that it has one, as
`gres-mig:1:8000 gres-mig:gated`.
]]

local served_by = ...
local NO_VAL, NO_VAL16 = 4294967294, 65534
local LONGEST = 1023 -- what Slurm takes of a constraint
local gates = {}

local function number(value)
  return value and value < NO_VAL and value or 0
end

-- How many nodes a job needs at the least, as far as it says so.
local function nodes_of(job)
  local nodes, a_node = number(job.min_nodes), job.ntasks_per_node or NO_VAL16
  return a_node > 0 and a_node < NO_VAL16 and math.max(nodes, math.ceil(number(job.num_tasks) / a_node)) or nodes
end

-- Whether Slurm would refuse it at submit, or hold it later, while all gates are closed: no placeholder is among the
-- nodes that it names or in its reservation, or it needs more than there are.
local function is_past_gates(job, load_sizes)
  local nodes = nodes_of(job)
  if (job.req_nodes or "") ~= "" or (job.reservation or "") ~= "" then
    return true
  elseif nodes <= 1 then
    return false
  end
  local sizes, machines = load_sizes(), 0
  for _, node in ipairs(sizes.types) do
    machines = machines + (tonumber(node.machines) or math.huge)
  end
  return nodes > math.min(tonumber(sizes.placeholders or 0), machines)
end

-- A feature stands for a size. Who names a profile that has its size in common with another one, such as 1g.24gb+me,
-- would find no place behind an open gate, again and again.
local function shares_size(board, profile)
  for _, other in ipairs(board) do
    if other ~= profile and other.memory == profile.memory then
      return not profile.by_size
    end
  end
  return false
end

-- None where a type without gates, or a slice of any size, can serve it, for there are no such features. Also how many
-- machines can, as far as that is known.
local function features_for(request, sizes, batch)
  local found, seen, machines = {}, {}, 0
  for _, node in ipairs(sizes.types) do
    local able = false
    for _, board in ipairs(node.boards) do
      local profile = served_by(board, request)
      if profile and (node.admission ~= "gates" or board.overhead or shares_size(board, profile)) then
        return nil
      end
      able = able or profile ~= nil
      if profile and not seen[profile.memory] then
        seen[profile.memory] = true
        local feature = string.format("migmem-%.0f", profile.memory)
        table.insert(found, batch and feature .. "|" .. feature .. "-try" or feature)
      end
    end
    machines = machines + (able and (tonumber(node.machines) or math.huge) or 0)
  end
  return table.concat(found, "|"), machines
end

-- Slurm reads & and | from left to right and knows one level of brackets (22.05). What counts nodes is joined to
-- nothing that it would heed, and what is too long is refused.
local function joined(own, features)
  if #own + #features + 5 > LONGEST then
    return nil
  elseif own == "" then
    return features
  elseif own:find("*", 1, true) then
    return nil
  elseif own:find("|", 1, true) and not own:find("[%[%(]") then
    own = "(" .. own .. ")"
  end
  return own .. "&" .. (features:find("|", 1, true) and "(" .. features .. ")" or features)
end

-- What its user wrote of a constraint, and its gate.
local function parted(constraint)
  constraint = constraint or ""
  local own, features = constraint:match("^(.*)&%(?(migmem%-%d[%w|-]*)%)?$")
  if not own and constraint:find("^migmem%-%d[%w|-]*$") then
    own, features = "", constraint
  end
  return own or constraint, features
end

-- What it prefers stands in for all of its constraint (22.05), so that the gate has to be in both.
local function prefer(job_desc, features)
  if (job_desc.prefer or "") ~= "" then
    job_desc.prefer = joined(parted(job_desc.prefer), features)
  end
end

-- Gives a new job its gate; whether it has one now.
function gates.submit(job_desc, request, sizes)
  local past = is_past_gates(job_desc, function()
    return sizes
  end)
  local features, machines = features_for(request, sizes, job_desc.script ~= nil)
  if past or not features or nodes_of(job_desc) > machines then
    return false
  end
  local constraint = joined(job_desc.features or "", features)
  local preferred = constraint and joined(job_desc.prefer or "", features)
  if not preferred then
    return false
  end
  job_desc.features = constraint
  prefer(job_desc, features)
  return true
end

-- Gives a waiting job that has a gate another size; whether it has one now.
function gates.resize(job_desc, job_rec, request, sizes)
  local own, features = parted(job_desc.features or job_rec.features)
  if not features then
    return false
  end
  local other = features_for(request, sizes, features:find("-try", 1, true) ~= nil)
  job_desc.features = other and joined(own, other) or own
  return other ~= nil
end

-- A waiting job keeps its gate with another constraint. It loses it with migmem, and for nodes without a placeholder,
-- as far as Lua can: to set nothing changes nothing (22.05), so that who wrote no constraint says `Features=` as well.
-- Whether it has one then, and what is to be said to who did not.
function gates.modify(job_desc, job_rec, ours, load_sizes)
  local own, features = parted(job_rec.features)
  if not features then
    -- Gone with a change that was its user's, who may not write here; a prolog that puts it back may.
    job_desc.admin_comment = job_desc.admin_comment and job_desc.admin_comment:gsub(" gres%-mig:gated", "")
    return false
  end
  local given, other = parted(job_desc.features or own)
  local changed, past = given, ours and is_past_gates(job_desc, load_sizes)
  if past and given == "" and job_desc.features ~= "" then
    return false, "migmem: a job has no gate that names nodes or a reservation, or needs so many nodes: say Features= as well"
  elseif ours and not past and job_desc.features and not other then
    changed = joined(given, features) or given
  end
  if changed ~= "" and (job_desc.features or past or not ours) then
    job_desc.features = changed
  end
  if ours and not past then
    prefer(job_desc, features)
  end
  return ours and not past
end

return gates
