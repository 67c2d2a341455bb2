" The next edit: asked for after a change, shown as it will be, taken with a key.

let s:window = 10      " lines above and below the cursor's line
let s:context = 100    " lines on both sides of these
let s:span = 12        " lines between which changes are one edit
let s:most = 8         " edits that are sent
let s:texts = {}       " by buffer: its text before the edit that is being made, and now
let s:edits = []       " those that were made before
let s:rejected = {}
let s:shown = {}       " a buffer, its changedtick, and edits, each of a line number, old lines and new ones
let s:request = {}
let s:timer = 0

function! s:wanted() abort
  return get(g:, 'localspec_next_edit', 0) && get(g:, 'localspec_enabled', 1) && &buftype ==# '' && &modifiable
        \ && empty(reg_executing() .. reg_recording()) && get(get(g:, 'localspec_filetypes', {}), &filetype, 1)
endfunction

" The text has changed, or Insert mode has ended: what is shown is out of date, and something else may follow.
function! localspec#next#changed() abort
  if !empty(s:shown) && s:shown.buffer == bufnr() && s:shown.tick == b:changedtick
    return
  endif
  call localspec#next#stop()
  if s:wanted()
    let s:timer = timer_start(get(g:, 'localspec_debounce', 60), {_ -> localspec#guarded('localspec#next#ask')})
  endif
endfunction

" A key was typed in Insert mode, or the cursor has moved there: a change that is shown gives way to text.
function! localspec#next#typed() abort
  if empty(s:shown) || s:shown.buffer != bufnr() || s:shown.tick != b:changedtick
    call localspec#next#stop()
  endif
endfunction

" Nothing is wanted any more: the connection of a request that runs is closed.
function! localspec#next#stop() abort
  call timer_stop(s:timer)
  if !empty(s:request)
    call localspec#http#cancel(s:request)
    let s:request = {}
    call localspec#note('')
  endif
  if !empty(s:shown)
    call localspec#view#erase(s:shown.buffer)
    let s:shown = {}
    call localspec#ghost#unmap()
  endif
endfunction

" Note the text of this buffer, or forget with `anew` what it was before. Changes that are near to each other
" are one edit.
function! localspec#next#note(anew) abort
  if !s:wanted()
    return
  endif
  let now = getline(1, '$')
  let [before, last] = a:anew ? [now, now] : get(s:texts, bufnr(), [now, now])
  let edit = s:difference(before, now)
  if max([len(edit[1]), len(edit[2])]) > s:span && before isnot last
    let s:edits += [[expand('%:.')] + s:difference(before, last)]
    let before = last
  endif
  let s:texts[bufnr()] = [before, now]
endfunction

" The lines between those that two texts share at their beginnings and ends: the first one's number, and both.
function! s:difference(old, new) abort
  let [start, end, least] = [0, 0, min([len(a:old), len(a:new)])]
  while start < least && a:old[start] ==# a:new[start]
    let start += 1
  endwhile
  while end < least - start && a:old[-end - 1] ==# a:new[-end - 1]
    let end += 1
  endwhile
  return [start + 1] + map([a:old, a:new], {_, lines -> len(lines) > start + end ? lines[start : len(lines) - end - 1] : []})
endfunction

" Ask for the edit that follows the last ones.
function! localspec#next#ask() abort
  call localspec#next#note(0)
  let [before, now] = get(s:texts, bufnr(), [[], []])
  let edits = filter(s:edits + [[expand('%:.')] + s:difference(before, now)], {_, edit -> edit[2] !=# edit[3]})
  if empty(edits) || !s:wanted()
    return
  endif
  let [line, column] = [line('.'), col('.') - 1]
  let [first, last] = [max([1, line - s:window]), min([line('$'), line + s:window])]
  let fields = {'path': expand('%:.'), 'language': &filetype, 'first_line': first, 'diagnostics': s:problems(),
        \ 'above': s:joined(getline(max([1, first - s:context]), first - 1)),
        \ 'before': s:joined(getline(first, line - 1)) .. strpart(getline(line), 0, column),
        \ 'after': s:joined([strpart(getline(line), column)] + getline(line + 1, last)),
        \ 'below': s:joined(getline(last + 1, last + s:context)),
        \ 'edits': map(edits[max([0, len(edits) - s:most]) :], {_, edit -> {'path': edit[0], 'line': edit[1], 'old': s:joined(edit[2]), 'new': s:joined(edit[3])}})}
  let got = {'buffer': bufnr(), 'tick': b:changedtick, 'first': first, 'since': reltime()}
  call localspec#note('…')
  let got.request = localspec#http#ask('/localspec/next-edit', extend(fields, localspec#model()), {_ -> 0}, function('s:came', [got]))
  let s:request = got.request.live ? got.request : {}
endfunction

function! s:joined(lines) abort
  return join(map(copy(a:lines), {_, line -> line .. "\n"}), '')
endfunction

" What the editor has found wrong: of Neovim's diagnostics, or of the location list.
function! s:problems() abort
  let found = has('nvim') ? luaeval('vim.tbl_map(function(each) return {line = each.lnum + 1, message = each.message} end, vim.diagnostic.get(0))')
        \ : map(filter(getloclist(0), {_, each -> each.bufnr == bufnr() && each.lnum}), {_, each -> {'line': each.lnum, 'message': each.text}})
  return found[:63]
endfunction

function! s:came(got, error) abort
  let s:request = {}
  if !empty(a:error)
    return localspec#failed(a:error)
  endif
  let answer = json_decode(a:got.request.answer.body)
  call localspec#named(answer)
  call localspec#note(printf('%.0f ms', reltimefloat(reltime(a:got.since)) * 1000))
  if bufnr() != a:got.buffer || b:changedtick != a:got.tick || mode() !~# '^[in]'
    return
  endif
  let edits = map(answer.edits, {_, edit -> [a:got.first + edit.start, edit.old, edit.new]})
  call s:show(filter(edits, {_, edit -> !has_key(s:rejected, string(edit[1:]))}))
endfunction

function! s:show(edits) abort
  call localspec#view#erase(bufnr())
  let s:shown = empty(a:edits) ? {} : {'buffer': bufnr(), 'tick': b:changedtick, 'edits': a:edits}
  for edit in a:edits
    call localspec#view#change(edit[0], len(edit[1]), edit[2])
  endfor
  call localspec#ghost#unmap()
  if !empty(a:edits)
    call localspec#ghost#map(mode()[0], {'all': '<Tab>', 'dismiss': '<C-]>'}, 'localspec#next#key')
  endif
endfunction

" What is shown, for whoever looks.
function! localspec#next#shown() abort
  return get(s:shown, 'edits', [])
endfunction

" Take the first edit, or go to it where it is not on the screen; or reject all of them.
function! localspec#next#key(part, key) abort
  let [lnum, old, new] = s:shown.edits[0]
  if a:part ==# 'dismiss'
    for edit in s:shown.edits
      let s:rejected[string(edit[1:])] = 1
    endfor
    return s:show([])
  elseif lnum < line('w0') || lnum > line('w$')
    normal! m'
    return cursor(lnum, 1)
  endif
  let both = min([len(old), len(new)])
  if both
    call setline(lnum, new[: both - 1])
  endif
  if len(new) > both
    call append(lnum + both - 1, new[both :])
  elseif len(old) > both
    call deletebufline('%', lnum + both, lnum + len(old) - 1)
  endif
  call cursor(lnum + max([len(new), 1]) - 1, strlen(get(new, -1, '')) + 1)
  let rest = map(s:shown.edits[1:], {_, edit -> [edit[0] + len(new) - len(old)] + edit[1:]})
  call s:show(rest)
endfunction
